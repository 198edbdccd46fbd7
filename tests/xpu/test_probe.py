"""What the probe says about machines that this one is not: each refusal with its remedy."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

import pytest
import torch

import qcore
from qcore_xpu import plugin, probe

ARC, PROCESSOR = "0000:03:00.0", "0000:00:02.0"


def gpu(name="Intel(R) Arc(TM) B580 Graphics", driver="1.6.33578", fp64=True):
    return SimpleNamespace(name=name, driver_version=driver, has_fp64=fp64)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """``machine(...)``: a machine to be probed. ``pci``: addresses to (vendor, class); ``nodes``: render nodes."""
    for name in probe._VISIBLE:
        monkeypatch.delenv(name, raising=False)

    def make(
        *, xpu="20260000", gpus=(), count=None, pci=None, nodes=(), vendor="0x8086", device_files=None, cuda=None,
        version="2.13.0+xpu", triton="3.7.2", missing=(), fault="",
    ):  # fmt: skip
        monkeypatch.setattr(torch.version, "xpu", xpu)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch, "__version__", version if xpu else "2.13.0+cpu")
        monkeypatch.setattr(torch.xpu, "device_count", count or (lambda: len(gpus)))
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: gpus[index])
        monkeypatch.setattr(probe, "installed_version", lambda name: triton if name == "triton-xpu" else "")
        monkeypatch.setattr(probe, "why_not_triton", lambda: fault)
        monkeypatch.setattr(probe.aten, "missing", lambda name: f"no {name}." if name in missing else "")
        for address, (vendor_id, kind) in (pci or {}).items():
            folder = tmp_path / "sys/bus/pci/devices" / address
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(f"{vendor_id}\n")
            (folder / "class").write_text(f"{kind}\n")
        for node in nodes:
            folder = tmp_path / "sys/class/drm" / node / "device"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(f"{vendor}\n")
        for file in nodes if device_files is None else device_files:
            (tmp_path / "dev/dri").mkdir(parents=True, exist_ok=True)
            (tmp_path / "dev/dri" / file).touch()
        return probe.probe(tmp_path)

    return make


CARD = {ARC: ("0x8086", "0x030000")}


def test_a_machine_with_a_gpu(machine):
    found = machine(gpus=[gpu()])
    assert isinstance(found, qcore.Available)
    assert found.device == "1 x Intel(R) Arc(TM) B580 Graphics"
    assert found.driver == "driver 1.6.33578, torch 2.13.0+xpu, SYCL 20260000, triton 3.7.2"
    assert found.details == {"device": "xpu:0", "gpus": 1}


def test_several_gpus(machine):
    found = machine(gpus=[gpu("A"), gpu("B", "1.7"), gpu("A")], triton="")
    assert found.device == "2 x A, 1 x B"
    assert found.driver.startswith("driver 1.6.33578 and 1.7, ")
    assert found.driver.endswith("triton none")
    assert found.details["gpus"] == 3


def test_a_gpu_without_float64_is_available_and_says_so(machine):
    found = machine(gpus=[gpu("Intel(R) Arc(TM) A770 Graphics", fp64=False)])
    assert isinstance(found, qcore.Available)
    assert "run float64 on another device" in found.details["float64"]


def test_what_a_gpu_does_without_is_in_the_details(machine):
    found = machine(gpus=[gpu()], missing=("_int_mm",), fault="Triton is not installed.")
    assert isinstance(found, qcore.Available)
    assert found.details["ops"] == "no _int_mm."
    assert found.details["triton"] == "Triton is not installed."


@pytest.mark.parametrize("xpu", ["20260000", None])
def test_no_gpu_is_nothing_to_warn_about(machine, xpu):
    found = machine(xpu=xpu)
    assert isinstance(found, qcore.Unavailable)
    assert not found.broken
    assert "no Intel GPU was found" in found.reason


@pytest.mark.parametrize(
    ("vendor", "kind"),
    [
        ("0x10de", "0x030000"),  # NVIDIA's
        ("0x8086", "0x020000"),  # a network card
        ("0x8086", "0x120000"),  # an NPU
        ("0x8086", "0x060000"),  # the host bridge
    ],
)
def test_devices_that_are_no_gpu_of_intels(machine, vendor, kind):
    found = machine(xpu=None, pci={ARC: (vendor, kind)})
    assert not found.broken
    assert "no Intel GPU was found" in found.reason


def test_a_render_node_of_another_vendor(machine):
    assert not machine(xpu=None, nodes=["renderD128"], vendor="0x1002").broken


@pytest.mark.parametrize("kind", ["0x030000", "0x038000"])
def test_a_torch_for_the_cpu_beside_a_card(machine, kind):
    found = machine(xpu=None, pci={PROCESSOR: ("0x8086", "0x030000"), ARC: ("0x8086", kind)})
    assert found.broken
    assert f"an Intel GPU was found (PCI {ARC})" in found.reason
    assert "built for the CPU only; install its XPU build, torch==2.13.0+xpu: see pytorch.org" in found.reason


def test_a_torch_for_the_cpu_in_a_container_with_a_render_node(machine):
    found = machine(xpu=None, nodes=["renderD128"])
    assert found.broken
    assert "(/dev/dri/renderD128)" in found.reason


def test_graphics_in_the_processor_are_no_reason_to_warn(machine):
    found = machine(xpu=None, pci={PROCESSOR: ("0x8086", "0x030000")})
    assert not found.broken
    assert "an integrated Intel GPU was found" in found.reason
    assert "Core Ultra" in found.reason


def test_a_torch_for_another_gpu_was_a_choice(machine):
    found = machine(xpu=None, cuda="13.0", pci=CARD)
    assert not found.broken
    assert "built for CUDA" in found.reason


def test_a_driver_that_is_missing_or_too_old(machine):
    found = machine(pci=CARD, device_files=["renderD128"])
    assert found.broken
    assert "libze-intel-gpu1 and intel-opencl-icd" in found.reason
    assert "SYCL_UR_TRACE=1" in found.reason


def test_what_torch_says_of_the_driver_is_passed_on(machine):
    def count():
        raise RuntimeError("Native API failed: UR_RESULT_ERROR_UNINITIALIZED\nmore")

    found = machine(count=count, pci=CARD, device_files=["renderD128"])
    assert found.broken
    assert "cannot use it (Native API failed: UR_RESULT_ERROR_UNINITIALIZED)." in found.reason


def test_a_gpu_that_does_not_start(machine):
    class Failing(list):
        def __getitem__(self, index):
            raise RuntimeError

    found = machine(gpus=Failing([1]))
    assert found.broken
    assert "finds 1 Intel GPUs, but cannot initialize them (RuntimeError)" in found.reason
    assert "libze-intel-gpu1" in found.reason


def test_no_device_file(machine):
    found = machine(pci=CARD)
    assert found.broken
    assert "docker run --device /dev/dri" in found.reason
    assert "xe or i915" in found.reason


def test_a_device_file_that_the_user_may_not_open(machine, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = machine(pci=CARD, device_files=["renderD128", "renderD129"])
    assert found.broken
    assert "has no permission to open /dev/dri/renderD128" in found.reason
    assert "sudo usermod -aG render $USER" in found.reason


@pytest.mark.parametrize(
    ("name", "value"),
    [("ZE_AFFINITY_MASK", ""), ("ONEAPI_DEVICE_SELECTOR", ""), ("ONEAPI_DEVICE_SELECTOR", "opencl:cpu")],
)
def test_gpus_that_the_user_hides(machine, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    found = machine(pci=CARD, device_files=["renderD128"])
    assert not found.broken
    assert f"{name}={value} hides it; unset the variable" in found.reason


@pytest.mark.parametrize(("name", "value"), [("ZE_AFFINITY_MASK", "7"), ("ONEAPI_DEVICE_SELECTOR", "level_zero:gpu")])
def test_a_filter_that_may_not_be_to_blame(machine, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    found = machine(pci=CARD, device_files=["renderD128"])
    assert found.broken
    assert f"It may be hidden by {name}={value}:" in found.reason
    assert "libze-intel-gpu1" in found.reason


def test_a_device_file_is_asked_for_before_a_filter_is_blamed(machine, monkeypatch):
    monkeypatch.setenv("ZE_AFFINITY_MASK", "")
    assert "docker run --device /dev/dri" in machine(pci=CARD).reason


def test_torchs_error_is_passed_on_if_no_gpu_is_found(machine):
    def count():
        raise RuntimeError("Level-Zero: no loader")

    found = machine(count=count)
    assert found.broken
    assert "torch 2.13.0+xpu finds no Intel GPU (Level-Zero: no loader). Install or upgrade Intel's" in found.reason


def test_torchs_warning_that_there_is_none_is_not_passed_on(machine):
    def count():
        warnings.warn("XPU device count is zero!", stacklevel=1)
        return 0

    assert machine(count=count).reason == "no Intel GPU was found."


def test_triton_goes_by_several_names(monkeypatch):
    for name in ("triton-xpu", "pytorch-triton-xpu", "triton"):
        monkeypatch.setattr(probe, "installed_version", lambda asked, name=name: "3.7" if asked == name else "")
        assert probe.triton_version() == "3.7"


def test_this_machine():
    assert isinstance(plugin.qcore_probe(), (qcore.Available, qcore.Unavailable))
