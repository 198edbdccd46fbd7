"""What the probe says: of the device here, and of everything that can be missing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

import qcore
from qcore import EMULATED, OFFLOAD, Available, Unavailable
from qcore_vulkan import device, native, probe
from qcore_vulkan.description import Matrix


@pytest.fixture
def known(monkeypatch):
    """Sets the devices that are found."""
    rank = probe.rank.__wrapped__

    def set_devices(*found):
        def answer():
            if found and isinstance(found[0], Exception):
                raise found[0]
            return list(found)

        for module in (device, probe):
            monkeypatch.setattr(module, "devices", answer)
        monkeypatch.setattr(probe, "rank", rank)

    return set_devices


@pytest.fixture(scope="module")
def here():
    """The first device of this machine."""
    return device.devices()[0]


def gpu(here, **changes):
    return replace(here, name="Some GPU", type="discrete", **changes)


def test_the_device_of_this_machine_serves():
    found = probe.probe()
    assert isinstance(found, Available)
    assert found.device
    assert "Vulkan 1." in found.driver
    assert found.details["device"] == "cpu"
    assert found.details["type"] in {"cpu", "discrete", "integrated", "virtual", "other"}


def test_probing_opens_no_device():
    code = "from qcore_vulkan import plugin, device\nprint(type(plugin.qcore_probe()).__name__, len(device._open))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Available", "0"]


def test_without_a_driver_it_says_what_to_install():
    nowhere = {"VK_ICD_FILENAMES": "/nowhere.json", "VK_DRIVER_FILES": "/nowhere.json"}
    code = "from qcore_vulkan import probe\nfound = probe.probe()\nprint(found.broken, found.reason)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **nowhere}
    )
    assert done.stdout.startswith("False no driver: ")
    assert "apt-get install mesa-vulkan-drivers" in done.stdout


@pytest.mark.parametrize(
    ("text", "broken", "remedy"),
    [
        ("no loader: libvulkan.so.1: cannot open shared object file", False, "libvulkan1"),
        ("no driver: vkCreateInstance: VK_ERROR_INCOMPATIBLE_DRIVER", False, "mesa-vulkan-drivers"),
        ("no device: the installed Vulkan drivers report no device", False, "vulkaninfo"),
        ("not built: this installation has no library", True, "not built"),
    ],
)
def test_what_is_missing_is_named_with_a_remedy(known, text, broken, remedy):
    known(native.NoDevice(text))
    found = probe.probe()
    assert isinstance(found, Unavailable)
    assert found.reason.startswith(text)
    assert remedy in found.reason
    assert found.broken is broken


def test_a_driver_that_fails_is_broken(known):
    known(native.VulkanError("vkEnumeratePhysicalDevices: VK_ERROR_INITIALIZATION_FAILED"))
    found = probe.probe()
    assert isinstance(found, Unavailable)
    assert found.broken
    assert "VK_ERROR_INITIALIZATION_FAILED" in found.reason


def test_a_device_that_lacks_a_feature_says_which(known, here):
    known(replace(here, missing="its storage buffers have no 16-bit elements"))
    found = probe.probe()
    assert isinstance(found, Unavailable)
    assert "no 16-bit elements" in found.reason


def test_a_device_named_that_is_not_here_is_an_error_of_the_user(known, here, monkeypatch):
    known(here)
    monkeypatch.setenv("QCORE_VULKAN_DEVICE", "geforce")
    found = probe.probe()
    assert isinstance(found, Unavailable)
    assert found.broken
    assert "'geforce'" in found.reason
    assert "QCORE_VULKAN_DEVICE=geforce requests it" in found.reason
    assert here.name in found.reason


def test_a_gpu_is_chosen_before_the_cpu_and_offers_to_serve(known, here):
    known(replace(here, type="cpu"), gpu(here, index=1))
    found = probe.probe()
    assert found.device == "Some GPU"
    assert f"0: {here.name}, 1: Some GPU" in found.details["devices"]
    assert probe.rank() == OFFLOAD


def test_software_serves_on_request_only(known, here):
    known(replace(here, type="cpu"))
    assert probe.rank() == EMULATED


@pytest.mark.parametrize(
    ("features", "matrices", "left_out", "used"),
    [
        ({"integer_dot": False}, (), "", ""),
        ({}, (), "", "integer dot product"),
        ({"cooperative_matrix": True}, ("f16",), "", "float16 cooperative matrices, integer dot product"),
        ({"cooperative_matrix": True}, ("s8",), "", "int8 cooperative matrices, integer dot product"),
        ({"cooperative_matrix": True}, ("s8", "f16"), "GL_KHR_cooperative_matrix", "integer dot product"),
    ],
)
def test_what_is_used_and_why_the_rest_is_off(known, here, monkeypatch, features, matrices, left_out, used):
    shapes = tuple(Matrix(16, 16, 16, name, name, "s32", "s32", False, "subgroup") for name in matrices)
    plain = {**here.features, "cooperative_matrix": False, "integer_dot": True}
    monkeypatch.setattr(probe, "left_out", lambda variant: left_out)
    known(replace(here, features={**plain, **features}, cooperative_matrix=shapes))
    details = probe.probe().details
    assert details["uses"] == (used or "plain arithmetic")
    assert left_out in details.get("off", "")
    assert details.get("off", "").count(":") == 3 - (0 if not used else used.count(",") + 1)


def test_doctor_shows_the_device():
    status = next(status for status in qcore.plugins() if status.name == "vulkan")
    assert status.state == "available", status.reason
    from qcore.cli.doctor import plugin_table

    (row,) = plugin_table([status]).rows
    assert status.device in row[-1]
    assert "uses=" in row[-1]
