"""What the probe says about machines that this one is not, and that looking at the plugin imports no Triton."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch

import qcore
from qcore_cuda import nvml, plugin, probe


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """``machine(cuda=..., hip=..., count=..., files=..., triton=..., names=...)``: a machine to be probed."""

    def make(*, cuda="13.0", hip=None, count=1, files=(), triton="3.6.0", names=("NVIDIA H200",), version="2.13.0"):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.cuda, "device_count", count if callable(count) else lambda: count)
        monkeypatch.setattr(probe, "triton_version", lambda: triton)
        monkeypatch.setattr(nvml, "driver", lambda: nvml.Driver(tuple(names), "580.65"))
        probe.triton_fault.cache_clear()
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        return probe.probe(tmp_path)

    yield make
    probe.triton_fault.cache_clear()


def test_a_machine_with_a_gpu(machine):
    found = machine()
    assert isinstance(found, qcore.Available)
    assert found.device == "1 x NVIDIA H200"
    assert found.driver == "driver 580.65, CUDA 13.0, triton 3.6.0"
    assert found.details == {"device": "cuda:0", "gpus": 1}


def test_several_gpus_and_hidden_ones(machine):
    assert machine(count=3, names=("A", "B", "A")).device == "2 x A, 1 x B"
    assert machine(count=1, names=("A", "B")).device == "1 x A or B"
    assert machine(count=2, names=()).device == "2 x NVIDIA GPU"


def test_rocm(machine):
    found = machine(cuda=None, hip="6.4", count=8)
    assert isinstance(found, qcore.Available)
    assert found.device == "8 x AMD GPU"
    assert found.driver == "ROCm 6.4, triton 3.6.0"


def test_no_gpu_is_nothing_to_warn_about(machine):
    for found in (machine(count=0), machine(cuda=None, version="2.13.0+cpu")):
        assert isinstance(found, qcore.Unavailable)
        assert not found.broken
        assert "no" in found.reason
        assert "GPU" in found.reason


@pytest.mark.parametrize("file", ["dev/nvidia0", "proc/driver/nvidia/version"])
def test_a_torch_for_the_cpu_beside_a_gpu(machine, file):
    found = machine(cuda=None, version="2.13.0+cpu", files=[file])
    assert found.broken
    assert f"an NVIDIA GPU was found (/{file})" in found.reason
    assert "pip install --force-reinstall torch==2.13.0" in found.reason


def test_a_torch_for_the_cpu_beside_an_amd_gpu(machine):
    found = machine(cuda=None, version="2.13.0+cpu", files=["dev/kfd"])
    assert found.broken
    assert "ROCm build of torch" in found.reason


def test_a_driver_that_is_too_old(machine):
    found = machine(count=0, files=["dev/nvidia0"])
    assert found.broken
    assert "must support CUDA 13.0: upgrade the driver" in found.reason


def test_a_driver_that_raises(machine):
    def count():
        raise RuntimeError("unknown error\nmore")

    found = machine(count=count, files=["dev/nvidia0"])
    assert found.broken
    assert "cannot use it (unknown error)." in found.reason


@pytest.mark.parametrize("value", ["", "-1"])
def test_gpus_that_the_user_hides(machine, monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    found = machine(count=0, files=["dev/nvidia0"])
    assert not found.broken
    assert "hides every GPU" in found.reason


@pytest.mark.parametrize(("triton", "what"), [("", "not installed"), ("3.4.1", "3.4.1 is too old"), ("2.0", "too old")])
def test_triton_missing_or_too_old(machine, triton, what):
    found = machine(triton=triton)
    assert found.broken
    assert what in found.reason
    assert "pip install 'triton>=3.5'" in found.reason


@pytest.mark.parametrize("triton", ["3.5.0", "3.5.1+git12", "3.5.0.dev1", "4.0", "my-own-build"])
def test_triton_new_enough(machine, triton):
    assert isinstance(machine(triton=triton), qcore.Available)


def test_elsewhere_than_on_linux(machine, monkeypatch):
    monkeypatch.setattr(probe.platform, "system", lambda: "Darwin")
    assert "this is Darwin" in machine(triton="").reason


def test_triton_goes_by_several_names(monkeypatch):
    monkeypatch.setattr(probe, "installed_version", lambda name: "3.5.1" if name == "pytorch-triton-rocm" else "")
    assert probe.triton_version() == "3.5.1"
    monkeypatch.setattr(probe, "installed_version", lambda name: "")
    assert probe.triton_version() == ""


def test_the_real_versions():
    assert probe.triton_version() == metadata.version("triton")


class Library:
    """An NVML with two GPUs; ``broken`` names functions that fail."""

    def __init__(self, *broken):
        self.broken, self.shut = broken, 0

    def nvmlInit_v2(self):  # noqa: N802
        return int("init" in self.broken)

    def nvmlShutdown(self):  # noqa: N802
        self.shut += 1

    def nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        count._obj.value = 2
        return int("count" in self.broken)

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802
        handle._obj.value = index + 1
        return int("handle" in self.broken and index == 0)

    def nvmlDeviceGetName(self, handle, buffer, length):  # noqa: N802
        buffer.value = f"GPU {handle.value}".encode()
        return 0

    def nvmlSystemGetDriverVersion(self, buffer, length):  # noqa: N802
        buffer.value = b"580.65"
        return int("version" in self.broken)


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ((), (("GPU 1", "GPU 2"), "580.65")),
        (("init",), ((), "")),
        (("count",), ((), "580.65")),
        (("handle",), (("GPU 2",), "580.65")),
        (("version",), (("GPU 1", "GPU 2"), "")),
    ],
)
def test_nvml(monkeypatch, broken, expected):
    library = Library(*broken)
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: library)
    assert nvml.driver() == expected
    assert library.shut == (broken != ("init",))


def test_nvml_is_not_there(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(nvml.ctypes, "CDLL", missing)
    assert nvml.driver() == ((), "")


SCRIPT = """
import json, sys
import qcore
import qcore_cuda.plugin as plugin
state = plugin.qcore_probe()
request = qcore.LinearRequest(
    qcore._torch.device("cpu"), qcore._torch.float32, qcore._torch.float32, 16, 64, None,
    qcore.grouped_int4(32), None, None, False, False,
)
plugin.qcore_linear(request)
status = {s.name: s for s in qcore.plugins()}["cuda"]
print(json.dumps([type(state).__name__, status.state.value, status.reason, [m for m in sys.modules if m == "triton"]]))
"""


def test_looking_at_the_plugin_imports_no_triton():
    run = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    probed, state, reason, triton = json.loads(run.stdout.splitlines()[-1])
    assert triton == []
    assert state in ("available", "unavailable")
    assert (probed == "Available") == (state == "available") == (reason == "")


def test_the_hook_answers():
    assert isinstance(plugin.qcore_probe(), (qcore.Available, qcore.Unavailable))
