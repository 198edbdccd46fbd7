"""Laws on a plugin as a whole: discovery, hooks, formats, unusual requests, a broken neighbour."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...contracts import CONTRACTS, CONV2D, GroupedLinearRequest, LinearRequest, Request
from ...contracts.inputs import Draw
from ...discovery import hookspecs
from ...discovery.hookspecs import hookimpl
from ...discovery.kernels import Available
from ...discovery.registry import registry
from ...errors import FormatError
from ...formats import Format, ZeroPoint, find_element
from ...resolving.resolver import resolve
from ...resolving.verification import difference, run_check
from ...runtime import settings
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from ..check import BrokenLawError, packed_by
from ..layouts import layout_fault, layouts_of
from ..preflight import HEAVY
from ..target import Target
from .base import InapplicableError, Law, RefusedError, Sample, Samples, SkippedLawError

_DEVICE_LIBRARIES = (
    "libOpenCL", "libamdhip", "libcublas", "libcuda", "libcudart", "libhsa", "libnvrtc", "libpjrt", "libsycl", "libtpu",
    "libur_loader", "libvulkan", "libze_loader",
)  # fmt: skip


def light(target: Target, _samples: Samples) -> None:
    """Check that the entry point imports no device's stack and loads no native library."""
    flight = target.preflight
    if flight.skipped:
        raise InapplicableError(flight.skipped)
    if flight.error or flight.died:
        raise BrokenLawError("discovery", flight.error or flight.died)
    heavy = sorted(set(flight.modules) & set(HEAVY))
    if heavy:
        raise BrokenLawError(
            "discovery", f"importing the entry point imports {', '.join(heavy)}; import inside the kernel instead"
        )
    native = [path for path in flight.libraries if _is_native(path, flight.home)]
    if native:
        raise BrokenLawError(
            "discovery", f"importing the entry point loads {', '.join(native)}; load it at the first call instead"
        )


def _is_native(path: str, home: str) -> bool:
    return Path(path).name.startswith(_DEVICE_LIBRARIES) or bool(home and path.startswith(home))


def hooks(target: Target, _samples: Samples) -> None:
    """Check that every function named like a hook is one: spelled correctly, and marked with hookimpl."""
    known = [name for name in dir(hookspecs) if name.startswith("qcore_")]
    for name, value in inspect.getmembers(target.plugin, inspect.isroutine):
        if hasattr(value, "qcore_impl") or getattr(value, "__module__", None) != getattr(
            target.plugin, "__name__", None
        ):
            continue
        if name in known:
            raise BrokenLawError("hooks", f"{name} is not marked with @qcore.hookimpl, so it is never called")
        if close := difflib.get_close_matches(name, known, n=1, cutoff=0.9):
            raise BrokenLawError("hooks", f"{name} looks like a typo of the hook {close[0]}, and lacks @qcore.hookimpl")


def offers(_target: Target, samples: Samples) -> None:
    """Check that the plugin offers a kernel for at least one request."""
    try:
        samples.any()
    except SkippedLawError as nothing:
        raise BrokenLawError("offers", f"{nothing}; a plugin that is available must offer at least one") from nothing


_SIZES = ((3, 5), (20, 77), (16, 168), (32, 256))
"""N and K: a K of 5, a ragged last group, and whole groups of all sizes; convolutions use every other pair."""


def formats(plugin: str) -> Iterator[Format]:
    """Yield every combination of element type, group size, zero point and layout to check for a plugin."""
    for layout in layouts_of(plugin).values():
        for dtype in layout.dtypes:
            for group in (None, 7, 32, 128):
                integer = find_element(dtype).is_integer
                kinds = [zero for zero in ZeroPoint if integer or zero is not ZeroPoint.INT]
                yield from (Format(dtype, group, zero, layout) for zero in kinds)


def every_format(target: Target, _samples: Samples) -> None:
    """Check layouts, and the offers for every format: lossless packing at odd K, ragged groups and extreme codes."""
    for layout in layouts_of(target.name).values():
        if fault := layout_fault(layout, target.device):
            raise BrokenLawError("formats", fault)
    tried = 0
    for contract in CONTRACTS.values():
        for fmt in formats(target.name):
            for n, k in _SIZES[:: 2 if contract is CONV2D else 1]:
                request = contract.request_for(Scheme(fmt), target.device, torch.float32, n, k)
                tried += _try_request(target, request, "formats")
    if not tried:
        raise RefusedError("the plugin refuses every format")


def _try_request(target: Target, request: Request, law: str) -> int:
    """Try every kernel that is offered for a request; returns the number of kernels."""
    answer = target.ask(request)
    what = f"{request.contract} {request.weight} n={request.n} k={request.k} to {request.out_dtype}"
    if answer.broken:
        raise BrokenLawError(law, f"{what}: {answer.reason}")
    try:
        draw = Draw(torch.Generator().manual_seed(7))
        extreme = draw.weight(request.n, request.k, request.weight, "codes")
        if isinstance(request, GroupedLinearRequest):
            extreme = QTensor.stack([extreme] * request.experts)
    except FormatError:  # the layout does not support this size
        return 0
    if request.device.type == "meta":
        return 0
    for kernel in answer.kernels:
        weight = extreme.to(target.device)
        lost = difference(kernel.unpack(packed_by(kernel, weight)), weight)
        if lost:
            raise BrokenLawError(law, f"{kernel.name}, {what}: unpack(pack(w)) is not w: {lost}")
        checked = run_check(kernel, request)
        if not checked.ok:
            raise BrokenLawError(law, f"{kernel.name}, {what}: {checked.reason}")
    return len(answer.kernels)


def unusual(target: Target, _samples: Samples) -> None:
    """Check that unusual requests are refused with a reason, or computed correctly."""
    for text in ("w4a16-g32", "w8a16", "w8a8", "w4a8-g32-asym"):
        scheme = Scheme.parse(text)
        plain: LinearRequest = CONTRACTS["linear"].request_for(scheme, target.device, torch.bfloat16, 24, 96)
        for request in (
            replace(plain, out_dtype=torch.float32),
            replace(plain, x_dtype=torch.float64, out_dtype=torch.float64),
            replace(plain, training=True),
            replace(plain, rows=1),
            replace(plain, n=1, k=1),
            replace(plain, device=torch.device("meta")),
        ):
            _try_request(target, request, "requests")


class _Raising:
    """A plugin all of whose hooks fail in some way."""

    @hookimpl
    def qcore_probe(self) -> Available:
        return Available("nothing")

    @hookimpl
    def qcore_linear(self) -> Any:
        raise RuntimeError("this plugin raises on purpose")

    @hookimpl
    def qcore_conv2d(self) -> Any:
        sys.exit(3)

    @hookimpl
    def qcore_embedding(self) -> Any:
        return None


class _Empty:
    """A plugin that cannot be registered: it has no hooks."""


def neighbour(target: Target, samples: Samples) -> None:
    """Check that the plugin is still selected next to broken plugins."""
    found = [sample for contract in CONTRACTS for sample in itertools.islice(_offered(samples, contract), 1)]
    if not found:
        raise RefusedError("the plugin refuses every case")
    with _beside({"qcore-kit-raising": _Raising(), "qcore-kit-empty": _Empty()}), settings.using(target.name):
        for sample in found:
            contract = sample.here.request.contract
            decision = resolve(sample.here.request)
            if decision.plugin != target.name:
                raise BrokenLawError(
                    "neighbour", f"next to a broken plugin, {decision.plugin} was selected for {contract}:\n{decision}"
                )


def _offered(samples: Samples, contract: str) -> Iterator[Sample]:
    for family in samples.families:
        if family[0] == contract:
            with contextlib.suppress(SkippedLawError):
                yield samples.get(*family)


@contextlib.contextmanager
def _beside(plugins: dict[str, Any]) -> Iterator[None]:
    for name, plugin in plugins.items():
        registry.add(name, plugin)
    try:
        yield
    finally:
        for name in plugins:
            registry.remove(name)


LAWS = (
    Law("discovery", "importing the entry point imports no device's stack and loads no native library", plugin=light),
    Law("hooks", "every function named like a hook is one", plugin=hooks),
    Law("offers", "the plugin offers a kernel for at least one request", plugin=offers),
    Law(
        "formats",
        "layouts preserve their codes; every format that is offered packs without loss and computes correctly",
        plugin=every_format,
    ),
    Law("requests", "unusual requests are refused with a reason, or computed correctly", plugin=unusual),
    Law("neighbour", "next to broken plugins this one is still selected", plugin=neighbour),
)
