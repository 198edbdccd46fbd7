"""What goes wrong around the native library: lost devices, forks, no drivers, damaged caches, the end of a process."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from vulkan_scale import chain, expected, module

from qcore import PluginError
from qcore_vulkan import description, native
from qcore_vulkan import device as devices

HELPERS = Path(__file__).parents[1] / "helpers"


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own that finds the helpers."""
    code = f"import sys; sys.path.insert(0, {str(HELPERS)!r})\n" + code
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True)


def test_a_lost_device_is_opened_anew():
    device = devices.get()
    x, y = torch.randn(3, 40), torch.empty(3, 40)
    program, buffer = chain(device, 3, 40), device.upload(x)
    device.inject(native.INJECT_LOST)
    with pytest.raises(native.DeviceLost, match="the device is lost"):
        program.run([x], [y])
    assert device.lost
    assert "lost" in repr(device)
    for call in (buffer.read, partial(program.run, [x], [y]), lambda: device.alloc(10), device.stats):
        with pytest.raises(PluginError, match="was lost earlier"):
            call()
    again = devices.get()
    assert again is not device
    del call, buffer, program
    gc.collect()
    chain(again, 3, 40).run([x], [y])
    torch.testing.assert_close(y, expected(x))
    device.close()


def test_a_forked_process_is_refused():
    done = run("""
import os, torch
from vulkan_scale import chain
from qcore_vulkan import device, native
opened = device.get()
x = torch.zeros(5)
buffer, program = opened.upload(x), chain(opened, 1, 5)
child = os.fork()
def open_another():
    device.Device(opened.description)
calls = (buffer.read, lambda: program.run([x], [x]), lambda: opened.alloc(5), opened.stats, open_another)
if not child:
    told = 0
    for call in calls:
        try:
            call()
        except native.Forked as error:
            told += "start workers with the 'spawn' method" in str(error)
    del buffer, program
    opened.close()
    os._exit(told)  # as workers end: destructors of a driver may hang in a process that has none of its threads
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
program.run([x], [x])
assert opened.stats().buffers == 1
print("parent lives")
""")
    assert done.stdout == "parent lives\n", done.stderr


def test_a_fork_while_another_thread_is_in_a_call():
    done = run("""
import os, signal, threading, torch
from vulkan_scale import chain
from qcore_vulkan import device, native
opened = device.get()
x, y = torch.zeros(200000), torch.empty(200000)
program = chain(opened, 1, 200000)
ends = False
def work():
    while not ends:
        program.run([x], [y])
threading.Thread(target=work).start()
statuses = []
for turn in range(5):
    child = os.fork()
    if not child:
        signal.alarm(20)  # a child that waits for a lock for ever is killed, and its status says so
        told = 0
        for call in (lambda: program.run([x], [x]), lambda: opened.pipeline("elementwise"), opened.stats):
            try:
                call()
            except native.Forked:
                told += 1
        os._exit(told)
    statuses.append(os.waitpid(child, 0)[1])
ends = True
print([os.waitstatus_to_exitcode(status) for status in statuses])
""")
    assert done.stdout == "[3, 3, 3, 3, 3]\n", done


def test_a_fork_before_the_first_use_is_harmless():
    done = run("""
import os, torch
from vulkan_scale import chain, module
from qcore_vulkan import device
child = os.fork()
x, y = torch.ones(5), torch.empty(5)
chain(device.get(), 1, 5).run([x], [y])
assert (y == 11).all()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("both ran")
""")
    assert done.stdout == "both ran\n", done.stderr


def test_a_process_ends_with_everything_alive():
    done = run("""
import threading, torch
from vulkan_scale import chain
from qcore_vulkan import device, native
opened = device.get()
x, y = torch.ones(5), torch.empty(5)
program, buffer = chain(opened, 1, 5), opened.upload(x)
def work():
    try:
        while True:
            program.run([x], [y])
    except native.VulkanError as error:
        assert "closed" in str(error)
threading.Thread(target=work, daemon=True).start()
program.itself, buffer.itself = program, buffer
print("ends")
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_no_driver(tmp_path):
    none = str(tmp_path / "none.json")
    done = run(
        """
from qcore_vulkan import device, native
try:
    device.get()
except native.NoDevice as error:
    print(error)
""",
        VK_ICD_FILENAMES=none,  # older loaders
        VK_DRIVER_FILES=none,
    )
    assert done.stdout.startswith(("no driver: ", "no device: ")), done


def test_importing_loads_nothing():
    done = run("""
import qcore_vulkan.builder, qcore_vulkan.device, qcore_vulkan.native
loaded = open("/proc/self/maps").read()
assert "libvulkan" not in loaded and "libqcore_vulkan" not in loaded
""")
    assert done.returncode == 0, done.stderr


def test_an_installation_without_the_library(monkeypatch):
    monkeypatch.setattr(native, "built", lambda _: None)
    native.library.cache_clear()
    with pytest.raises(native.NoDevice, match="not built: this installation of qcore-vulkan has no lib"):
        native.library()


def test_a_library_that_cannot_be_loaded(monkeypatch, tmp_path):
    (tmp_path / native.FILE).write_bytes(b"not a library")
    monkeypatch.setattr(native, "built", lambda _: tmp_path / native.FILE)
    native.library.cache_clear()
    with pytest.raises(native.NoDevice, match=r"not built: .* cannot be loaded"):
        native.library()


def test_a_library_of_another_version(monkeypatch):
    monkeypatch.setattr(native, "ABI", 999)
    native.library.cache_clear()
    with pytest.raises(native.NoDevice, match="belongs to a different version; reinstall"):
        native.library()


@pytest.fixture(autouse=True)
def library_again():
    yield
    native.library.cache_clear()


def opened(cache: Path) -> devices.Device:
    return devices.Device(description.select(devices.devices()), cache=cache)


def test_pipelines_are_cached_on_disk(tmp_path):
    first = opened(tmp_path)
    first.compile(module(), (64, 3))
    assert not list(tmp_path.iterdir())
    first.close()
    (file,) = tmp_path.iterdir()
    assert file.name.startswith(first.description.driver_uuid)
    assert file.suffix == ".bin"
    written = file.read_bytes()
    second = opened(tmp_path)  # compiles nothing: the file stays as it is
    second.close()
    assert file.read_bytes() == written


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "longer", "other device", "text"])
def test_damaged_caches_are_ignored(tmp_path, damage):
    first = opened(tmp_path)
    first.compile(module(), (64, 3))
    first.close()
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    flipped = bytearray(good)
    flipped[-1] ^= 1
    other = bytearray(good)
    other[24 + 8] ^= 1
    bad = {
        "empty": b"",
        "cut": good[:-3],
        "flipped": bytes(flipped),
        "longer": good + b"x",
        "other device": bytes(other),
        "text": b"hello",
    }[damage]
    file.write_bytes(bad)
    second = opened(tmp_path)
    x, y = torch.randn(3), torch.empty(3)
    chain(second, 1, 3).run([x], [y])
    torch.testing.assert_close(y, expected(x))
    second.close()
    assert file.read_bytes()[:24] == good[:24] or len(file.read_bytes()) != len(bad)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_cache_folder_that_cannot_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    device = opened(blocked)
    device.compile(module(), (64, 3))
    device.close()
    assert blocked.read_text() == "not a folder"


def test_the_folder_of_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("QCORE_CACHE_DIR", str(tmp_path))
    device = devices.Device(description.select(devices.devices()))
    device.compile(module(), (64, 3))
    device.close()
    assert list((tmp_path / "vulkan").glob("*.bin"))


WORKLOAD = """
import gc, numpy as np, torch
from vulkan_scale import chain, pipeline
from qcore_vulkan import device
from qcore_vulkan.builder import Builder, Place
opened = device.get()
for rows, columns, pitch in ((1, 5, 0), (7, 33, 36), (900, 1100, 0), (2, 3, 0)):
    x, y = torch.randn(rows, columns), torch.empty(rows, columns)
    program = chain(opened, rows, columns, pitch, timed=rows == 7)
    for _ in range(3):
        program.run([x], [y])
buffer = opened.upload(np.ones(1000, np.float32))
zeros = opened.alloc(50_000_000)
b = Builder(opened)
target, scratch = b.output(4000), b.scratch(4000)
b.launch(pipeline(opened, 5), (16, 1, 1), (1000, 0.5), (buffer, scratch))
b.launch(pipeline(opened, 6), (16, 1, 1), (1000, 0.5), (buffer, target), barrier=False)
b.copy(scratch, target)
b.fill(scratch, 7)
program = b.program([], [Place(target, 1, 4000, 4000)])
y = torch.empty(1000)
program.run([], [y])
assert (y == 5.5).all()
del buffer, zeros
gc.collect()
"""


def test_the_validation_layer_has_nothing_to_say():
    done = run(WORKLOAD + "print(opened.stats().messages); opened.close()", QCORE_VULKAN_VALIDATE="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_the_validation_layer_speaks_up():
    done = run(
        WORKLOAD
        + """
b = Builder(opened)
first, second = b.scratch(4000), b.scratch(4000)
b.launch(pipeline(opened, 5), (16, 1, 1), (1000, 0.5), (first, None))
b.launch(pipeline(opened, 5), (16, 1, 1), (1000, 0.5), (first, second))
b.launch(pipeline(opened, 5), (16, 1, 1), (1000, 0.5), (second, first), barrier=False)
b.program()
print(opened.stats().messages)
""",
        QCORE_VULKAN_VALIDATE="1",
    )
    assert int(done.stdout) >= 2
    assert "VUID-vkCmdDispatch-None-0269" in done.stderr, "a missing binding has a number of these"
    assert "SYNC-HAZARD-READ-AFTER-WRITE" in done.stderr


def test_what_is_missing_fails_the_build():
    cmake = shutil.which("cmake")
    assert cmake, "apt-get install cmake"
    tools = Path(__file__).parents[2] / "plugins" / "vulkan" / "cmake" / "tools.cmake"
    blind = [f"-DCMAKE_FIND_USE_{path}=OFF" for path in ("SYSTEM_ENVIRONMENT_PATH", "CMAKE_SYSTEM_PATH")]
    done = subprocess.run([cmake, *blind, "-P", str(tools)], check=False, capture_output=True, text=True)
    assert done.returncode != 0
    told = " ".join(done.stderr.split())
    assert "without the Vulkan headers (vulkan/vulkan_core.h) and the shader compiler glslc" in told
    assert "apt-get install libvulkan-dev glslc" in told
    assert told.count("CMake Error") == 1
