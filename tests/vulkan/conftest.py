"""Tests run on whatever device Vulkan has to offer; in CI that is lavapipe, on the CPU."""

from __future__ import annotations

import importlib.util

import isolation
import pytest

if importlib.util.find_spec("qcore_vulkan") is None:  # it could not be built here: nox has said why
    collect_ignore_glob = ["*"]


@pytest.fixture(autouse=True)
def isolated(tmp_path_factory):
    """No settings from outside, and a cache of the session's own."""
    with isolation.isolated(tmp_path_factory.getbasetemp() / "cache"):
        yield


@pytest.fixture
def device():
    """The device that `qcore_vulkan` chooses by itself. Fails where there is none: CI installs one."""
    from qcore_vulkan import device

    return device.get()


@pytest.fixture
def own_device():
    """A device that no other test uses, closed afterwards. Its staging memory has grown to what copies use."""
    import numpy as np

    from qcore_vulkan import description, device

    made = device.Device(description.select(device.devices()))
    made.upload(np.zeros(65 << 20, np.uint8)).read()  # so large that its memory is not kept
    yield made
    made.close()
