"""Plugins of this process for the tests of the kit: the loopback distribution's kernels, with one thing changed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import qcore
from qcore.discovery.registry import registry
from qcore.plugin_api import why_not_encoding

LOOPBACK = Path(__file__).parents[2] / "thirdparty" / "dists" / "loopback" / "src"


@pytest.fixture(scope="session")
def loopback():
    """The loopback plugin's modules (its ops can be registered only once per process)."""
    sys.path.insert(0, str(LOOPBACK))
    try:
        return importlib.import_module("qcore_loopback.kernels")
    finally:
        sys.path.remove(str(LOOPBACK))


class Plugin:
    """Offers kernels made by ``linear(request)`` for every linear request on the CPU."""

    def __init__(self, linear, details=None):
        self._linear, self._details = linear, details

    @qcore.hookimpl
    def qcore_probe(self):
        return qcore.Available("a device", "a driver", self._details)

    @qcore.hookimpl
    def qcore_linear(self, request):
        if reason := why_not_encoding(request):
            return qcore.Refusal(reason)
        answer = self._linear(request)
        return qcore.Offer(answer) if isinstance(answer, qcore.Kernel) else answer


@pytest.fixture
def add(loopback):
    """``add("name", method=...)``: register a plugin whose kernel is loopback's with other methods, for one test."""
    names = set()

    def register(called="toy", plugin=None, details=None, **methods):
        kind = type("Toy", (loopback.Linear,), methods)
        registry.add(called, plugin or Plugin(lambda request: kind(request, called), details))
        names.add(called)
        return called

    yield register
    for name in names:
        registry.remove(name)
