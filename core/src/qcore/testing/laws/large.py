"""The law ``large``: a kernel is correct at the sizes of real layers, not only on the small problems of the cases.

The reference is computed for a sample of the rows and columns of a result: see `qcore.contracts.sampling`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...contracts import CONTRACTS, Problem, sampled
from ...contracts.inputs import Draw, Shape
from ...discovery.kernels import Kernel, Packed
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from ..check import BrokenLawError, ends_within, first_lines, pack_and_check, run_watched, same_values
from ..target import Target
from .base import Law, RefusedError, Sample, checked

ROWS = (17, 1, 256)
"""Rows of x (for convolutions, fewer images): a few, one as in decoding, and many as in a prompt."""
_LARGE_SIZES, _SMALL_SIZES = (4096, 4000, 3584, 3072), (1024, 1040, 1280, 1536)
"""One of N and K is drawn from the first, the other from the second: first a large N, then a large K."""
_TINY = (1040, 64)
"""N and K on which a kernel is timed first; an interpreter, which takes minutes for a real layer, runs these only."""
_MAX_CALL_SECONDS = 20.0
"""Limit in seconds for a call on a real layer, estimated from a call on a tiny layer."""
_TIME_BUDGET = 5.0
"""Seconds after which no further row counts and sizes are tried."""


@dataclass(frozen=True)
class _Size:
    """A layer's dtype, N, K, and for a convolution the height and width of its kernel."""

    dtype: torch.dtype
    n: int
    k: int
    side: int


def _sizes(draw: Draw) -> tuple[_Size, ...]:
    """Draw three layers: bfloat16, the most common dtype, first."""

    def pick(sizes: tuple[int, ...]) -> int:
        return sizes[int(draw.whole(0, len(sizes) - 1))]

    return (
        _Size(torch.bfloat16, pick(_LARGE_SIZES), pick(_SMALL_SIZES), 3),
        _Size(torch.float32, pick(_SMALL_SIZES), pick(_LARGE_SIZES), 1),
        _Size(torch.float16, pick(_LARGE_SIZES) + 1, pick(_SMALL_SIZES), 3),
    )


def large(target: Target, sample: Sample) -> None:
    """Check every kernel that is offered for layers of ordinary size, with two calls each."""
    case, start = sample.prepared.case, time.perf_counter()
    scheme = Scheme.parse(case.scheme)
    draw = Draw(torch.Generator().manual_seed(zlib.crc32(f"{sample.prepared.seed} large {case.id}".encode())))
    refused, tried = "", 0
    for size in _sizes(draw):
        build = partial(_BUILD[case.contract], draw, draw.fill(scheme), target.device)
        problem, tiny = build(size), build(replace(size, n=_TINY[0], k=_TINY[1]))
        answer = target.ask(problem.request)
        refused = answer.reason or refused
        timed = {kernel.name: kernel for kernel in target.ask(tiny.request).kernels}
        for kernel in answer.kernels:
            small = _packed(target, timed[kernel.name], tiny) if kernel.name in timed else None
            _try(_packed(target, kernel, problem), small, draw.generator, until=start + _TIME_BUDGET)
            tried += 1
        if time.perf_counter() > start + _TIME_BUDGET:
            break
    if not tried:
        raise RefusedError(f"the plugin refuses layers of ordinary size: {refused}")


@dataclass(frozen=True)
class _Layer:
    """A kernel with a problem and its packed weight."""

    target: Target
    kernel: Kernel
    problem: Problem
    packed: Packed

    @property
    def size(self) -> str:
        return f"{self.problem.request.n} x {self.problem.request.k}"


def _packed(target: Target, kernel: Kernel, problem: Problem) -> _Layer:
    here = problem.to(target.device)
    try:
        return _Layer(target, kernel, here, pack_and_check(kernel, here))
    except BrokenLawError as broken:
        size = f"{problem.request.n} x {problem.request.k}"
        raise BrokenLawError("large", f"{kernel.name} with a weight of {size}: {broken.fault.text}") from broken


def _try(layer: _Layer, tiny: _Layer | None, generator: torch.Generator, until: float) -> None:
    for rows in ROWS:
        tried = tiny if tiny is not None and _takes_too_long(tiny, layer, rows) else layer
        here, other = _rows(tried.problem, 0, rows), _rows(tried.problem, -rows, None)
        dtype = tried.problem.request.out_dtype
        what = f"{tried.kernel.name} with a weight of {tried.size} and {len(here.x)} rows in {dtype}"
        try:
            _check(tried, here, other, generator)
        except BrokenLawError as broken:
            raise BrokenLawError("large", f"{what}: {first_lines(broken)}") from broken
        if time.perf_counter() > until:
            return


def _takes_too_long(tiny: _Layer, layer: _Layer, rows: int) -> bool:
    """Whether a call on a real layer would take too long, estimated from a call on a tiny layer."""
    here, more = _rows(tiny.problem, 0, rows), layer.problem.weight.numel() / tiny.problem.weight.numel()
    for _ in range(2):  # the first call may compile
        start = time.perf_counter()
        checked("large", tiny.kernel.name, tiny.kernel(here.x, tiny.packed, here.bias, **here.given)).cpu()
        seconds = time.perf_counter() - start
        if seconds * more < _MAX_CALL_SECONDS:
            return False
    return True


def _check(layer: _Layer, here: Problem, other: Problem, generator: torch.Generator) -> None:
    """Check the result for ``here``, and that a call on ``other``, of the same shape, does not change it."""
    result = run_watched(layer.target, layer.kernel, here, layer.packed)
    kept = result.clone() if isinstance(result, Tensor) else result
    verdict = sampled(here, kept, generator)
    if not verdict.ok:
        raise BrokenLawError("results", f"wrong in the rows and columns sampled: {verdict.message}")
    run_watched(layer.target, layer.kernel, other, layer.packed)
    if not same_values(result, kept):
        raise BrokenLawError("outputs", "a later call changed the result of an earlier one")
    # A few rows of a long K are what kernels split along K, and add up in no fixed order.
    if len(here.x) == ROWS[0] and layer.problem.request.k >= min(_LARGE_SIZES):
        again = run_watched(layer.target, layer.kernel, here, layer.packed)
        if not same_values(checked("determinism", "a second call", again), kept):
            raise BrokenLawError("determinism", "two calls with the same input differ")


def _rows(problem: Problem, start: int, stop: int | None) -> Problem:
    x = problem.x[start:stop].contiguous()
    given = {
        name: ends_within(value, start, start + x.shape[0]) if name == "offsets" else value[start:stop].contiguous()
        for name, value in problem.given.items()
    }
    return replace(problem, x=x, given=given)


def _linear(draw: Draw, scheme: Scheme, device: torch.device, size: _Size) -> Problem:
    request = CONTRACTS["linear"].request_for(scheme, device, size.dtype, size.n, size.k)
    shape = Shape("large", (max(ROWS),), size.n, size.k, "same", weights="codes")
    return draw.linear(replace(request, bias=True), shape, dtype=size.dtype)


def _embedding(draw: Draw, scheme: Scheme, device: torch.device, size: _Size) -> Problem:
    request = CONTRACTS["embedding"].request_for(scheme, device, size.dtype, 4 * size.n, size.k // 2)
    weight = draw.weight(request.n, request.k, request.weight, "codes")
    return Problem(request, draw.whole(0, request.n - 1, max(ROWS)), weight)


def _conv2d(draw: Draw, scheme: Scheme, device: torch.device, size: _Size) -> Problem:
    channels, side = size.k // 8, size.side
    request = CONTRACTS["conv2d"].request_for(scheme, device, size.dtype, size.n // 16, channels)
    request = replace(request, kernel_size=(side, side), padding=(side // 2, side // 2), stride=(side, side), bias=True)
    x = draw.activations((max(ROWS) // 32, channels, 28, 31), request.x_dtype, "normal", "dense")
    weight = draw.weight(request.n, request.k, request.weight, "codes")
    return Problem(request, x, weight, draw.bias(request.n, "same", size.dtype))


def _grouped(draw: Draw, scheme: Scheme, device: torch.device, size: _Size) -> Problem:
    request = CONTRACTS["grouped_linear"].request_for(scheme, device, size.dtype, size.n // 4, size.k)
    weights = [draw.weight(request.n, request.k, request.weight, "codes") for _ in range(request.experts)]
    x = draw.activations((max(ROWS), request.k), request.x_dtype, "normal", "dense")
    ends = torch.arange(1, request.experts + 1, dtype=torch.int32) * (max(ROWS) // request.experts)
    return Problem(request, x, QTensor.stack(weights), None, {"offsets": ends})


_BUILD: dict[str, Callable[[Draw, Scheme, torch.device, _Size], Problem]] = {
    "linear": _linear,
    "embedding": _embedding,
    "conv2d": _conv2d,
    "grouped_linear": _grouped,
}

LAWS = (
    Law(
        "large",
        "at the sizes of real layers, the sampled rows and columns are correct",
        scheme=large,
        sparse=True,
    ),
)
