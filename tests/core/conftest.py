"""Every test starts from plain settings, an empty cache on disk and the built-in plugin, whatever else is installed."""

from __future__ import annotations

import itertools
from types import ModuleType

import isolation
import pytest
import torch

import qcore
from qcore.discovery.kernels import Kernel, Offer
from qcore.discovery.registry import BUILTIN, registry
from qcore.fallback import plugin as builtin
from qcore.resolving import offers, tuning, verification
from qcore.runtime import settings
from qcore.weights.qtensor import QTensor

_versions = itertools.count(1)
_PLAIN = {"linear": "qcore_linear", "conv2d": "qcore_conv2d", "embedding": "qcore_embedding"}


@pytest.fixture(autouse=True)
def isolated(tmp_path_factory):
    """No settings from outside, a cache of its own; verdicts, decisions and plugins as before afterwards."""
    memory = (settings._configured, tuning._known, offers._warned)
    saved = [(store, store.copy()) for store in memory]
    with isolation.isolated(tmp_path_factory.getbasetemp() / f"cache{next(_versions)}") as patch:
        patch.setattr(registry, "_entries", {BUILTIN: registry.entries()[BUILTIN]})
        yield
        for name in set(registry.entries()) - {BUILTIN}:
            registry.remove(name)
        for store, content in saved:
            store.clear()
            store.update(content)
    # What was found out about the built-in kernels stays, so that each is checked once per session.
    for key in [key for key in verification._seen if not key[0].startswith("torch|qcore|")]:
        del verification._seen[key]


@pytest.fixture(autouse=True)
def seed():
    """Random numbers of torch's own generator are the same for each test, alone or among others."""
    torch.manual_seed(0)


class StubKernel(Kernel):
    """Computes what the fallback computes, on bytes of its own: every packed tensor is stored back to front."""

    def __init__(self, name, request, fault=None):
        self.name, self.fault = name, fault
        self.inner = getattr(builtin, _PLAIN[request.contract])(request=request)[-1].kernel
        self.calls = self.packs = 0

    def pack(self, weight: QTensor):
        self.packs += 1
        if self.fault == "pack":
            raise RuntimeError("cannot pack")
        return {name: tensor.flip(0) for name, tensor in self.inner.pack(weight).items()}

    def unpack(self, packed):
        if self.fault == "lossy":
            packed = {**packed, "scale": packed["scale"] * 2}
        return self.inner.unpack({name: tensor.flip(0) for name, tensor in packed.items()})

    def __call__(self, x, packed, bias, **given):
        self.calls += 1
        if self.fault == "call":
            raise RuntimeError("no such instruction")
        y = self.inner(x, {name: tensor.flip(0) for name, tensor in packed.items()}, bias, **given)
        return y + 1 if self.fault == "wrong" else y


@pytest.fixture
def stub():
    """The class `StubKernel`."""
    return StubKernel


@pytest.fixture
def add_plugin():
    """``add_plugin(name, linear=..., probe=...)`` registers a plugin in this process; hooks by name without qcore_."""

    def add(name, version=None, **hooks):
        plugin = ModuleType(name)
        vars(plugin).update({f"qcore_{hook}": qcore.hookimpl(function) for hook, function in hooks.items()})
        # A version of its own, so that no verdict of another test is taken for this one's.
        registry.add(name, plugin, f"qcore-{name}", version or f"0.{next(_versions)}")
        return plugin

    return add


@pytest.fixture
def add_kernel(add_plugin):
    """``add_kernel(name, rank, fault)`` adds a plugin whose `StubKernel` serves every contract; gives its kernels."""

    def add(name, rank=qcore.NATIVE, fault=None, note=""):
        made = {}

        def offer(request):
            return Offer(made.setdefault(request, StubKernel(f"{name}.stub", request, fault)), rank, note)

        def same(request):
            return offer(request)

        # Three functions, since pluggy marks each with the name of its hook.
        add_plugin(name, linear=offer, conv2d=same, embedding=same)
        return made

    return add


@pytest.fixture
def request_of():
    """``request_of("w4a16-g32", n=16, k=64)``: a plain request on the CPU."""
    from qcore.resolving.explaining import plain_request

    def make(scheme="w4a16-g32", *, n=16, k=64, dtype=torch.float32, **more):
        return plain_request(scheme, n=n, k=k, dtype=dtype, **more)

    return make
