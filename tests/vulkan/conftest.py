"""Tests run on whatever device Vulkan has to offer; in CI that is lavapipe, on the CPU."""

from __future__ import annotations

import importlib.util
import os

import pytest

from qcore import resolver
from qcore.plugins import registry

if importlib.util.find_spec("qcore_vulkan") is None:  # it could not be built here: nox has said why
    collect_ignore_glob = ["*"]


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path_factory):
    """No settings from outside, a cache of the session's own, and nothing held against a kernel that failed before."""
    for name in [name for name in os.environ if name.startswith("QCORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("QCORE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
    if "vulkan" not in registry.entries():  # tests of core, in the same process, look at the built-in plugin alone
        registry._entries = None
    yield
    resolver.forget()


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
