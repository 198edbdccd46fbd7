"""Tests run on whatever device Vulkan has to offer; in CI that is lavapipe, on the CPU."""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("qcore_vulkan") is None:  # it could not be built here: nox has said why
    collect_ignore_glob = ["*"]


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path_factory):
    """No settings from outside, and a cache of the session's own."""
    for name in [name for name in os.environ if name.startswith("QCORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("QCORE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
