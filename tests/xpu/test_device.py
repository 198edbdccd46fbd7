"""Whether Triton can serve Intel GPUs, told without importing it, and launches that do not meet in its interpreter."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from importlib.machinery import ModuleSpec

import pytest

from qcore_xpu import device


@pytest.fixture
def triton_at(monkeypatch, tmp_path):
    """Let Triton be a folder with the given parts, or nowhere; without the interpreter."""

    def put(parts):
        spec = None
        if parts is not None:
            for part in parts:
                (tmp_path / "backends" / part).mkdir(parents=True)
            spec = ModuleSpec("triton", None, is_package=True)
            spec.submodule_search_locations = [str(tmp_path)]
        monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: spec)
        device._fault.cache_clear()

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield put
    device._fault.cache_clear()


def test_without_triton_the_remedy_is_said(triton_at):
    triton_at(None)
    assert "not installed" in device.why_not_triton()
    assert "triton-xpu" in device.why_not_triton()


def test_a_triton_for_other_gpus_is_not_taken_for_one_of_intel(triton_at):
    triton_at(["nvidia", "amd"])
    assert "no part for Intel GPUs" in device.why_not_triton()


def test_triton_for_intel_serves(triton_at):
    triton_at(["intel"])
    assert not device.why_not_triton()


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_the_interpreter_serves_with_any_triton(triton_at, monkeypatch, value):
    triton_at(["nvidia"])
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert device.interpreted()
    assert not device.why_not_triton()


@pytest.mark.parametrize("value", ["", "0", "off"])
def test_the_interpreter_may_be_switched_off(monkeypatch, value):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert not device.interpreted()


def test_modules_that_answer_requests_import_no_triton():
    modules = "triton_linear, embedding, conv2d, quantizing, triton_ops, serving"
    code = f"import sys; from qcore_xpu import {modules}; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class Kernel:
    """Remembers its launches, and whether two of them met."""

    def __init__(self):
        self.launches, self.running, self.met = [], 0, False

    def __getitem__(self, grid):
        def run(*args, **meta):
            self.running += 1
            self.met |= self.running > 1
            time.sleep(0.01)
            self.running -= 1
            self.launches.append((grid, args, meta))

        return run


def test_interpreted_launches_come_one_at_a_time(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernel = Kernel()
    threads = [threading.Thread(target=device.launch, args=(kernel, (2,), 7), kwargs={"B": 1}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kernel.launches == [((2,), (7,), {"B": 1})] * 3
    assert not kernel.met


def test_a_compiled_launch_waits_for_nobody(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernel = Kernel()
    with device._one_at_a_time:
        device.launch(kernel, (1,), 1)
    assert kernel.launches == [((1,), (1,), {})]
