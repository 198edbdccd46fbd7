"""Timing of configurations, for ``qcore tune`` and the tables of ``benchmarks/cuda_tables.py``.

Calls are timed inside a CUDA graph, which excludes the host's time, over copies of the weight that together exceed the
L2 cache, as the layers of a model do.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from qcore_triton.codes import mode_of
from qcore_triton.weights import Weight

from .problem import GemmProblem
from .products.base import Operands
from .runtime.device import Device

C = TypeVar("C")
Call = Callable[[], Any]
_MICROSECONDS = 600.0
"""The approximate duration of one replay."""
_MOST_COPIES = 96
_spin: Callable[[int], None] = getattr(torch.cuda, "_sleep", lambda _cycles: None)  # it has no public name
_HEAD_START = 400_000
"""Cycles that the GPU spins before a replay, about 0.2 ms, in which the host launches it."""


def copies(weight: Weight) -> list[Weight]:
    """The weight and copies of it, together three times as large as the L2 cache (at most 96)."""
    cache = torch.cuda.get_device_properties(weight.data.device).L2_cache_size
    count = min(_MOST_COPIES, max(1, math.ceil(3 * cache / weight.data.nbytes)))
    parts = ("data", "scale", "zero")

    def copy() -> Weight:
        return weight._replace(**{p: t.clone() for p in parts if (t := getattr(weight, p)) is not None})

    return [weight, *(copy() for _ in range(count - 1))]


def microseconds(calls: Sequence[Call], replays: int = 7) -> float:
    """Device time per call, the median over replays of a graph that contains all calls."""
    event: Callable[..., Any] = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    stream: Callable[[], Any] = torch.cuda.Stream
    side = stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
        start.record(side)
        for call in calls[:3]:
            call()
        end.record(side)
    torch.cuda.synchronize()
    estimate = max(3.0, start.elapsed_time(end) * 1e3 / min(3, len(calls)))
    count = max(4, min(160, math.ceil(_MICROSECONDS / estimate)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(replays):
        _spin(_HEAD_START)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def ranked(candidates: Iterable[C], calls: Callable[[C], Sequence[Call]]) -> list[tuple[float, C]]:
    """(microseconds, candidate), the fastest first; those that do not fit this device are left out."""
    found = []
    for candidate in candidates:
        # Triton and its assembler raise many kinds of errors for a configuration that does not fit; a broken device
        # fails the next one as well.
        with contextlib.suppress(Exception):
            found.append((microseconds(calls(candidate)), candidate))
    return sorted(found, key=lambda pair: pair[0])


def tune_float(x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    """Measure `weight_only.linear` for this number of rows, and keep the fastest configuration."""
    from . import weight_only

    device, problem, *_ = weight_only.plan(x, weight, out_dtype)
    many = copies(weight)

    def calls(choice: Any) -> list[Call]:
        return [partial(choice.product.launch, x, w, bias, device, problem, choice.config) for w in many]

    _tune(device, problem, calls)
    weight_only.forget()


def tune_int8(x: Tensor, weight: Weight, out_dtype: torch.dtype) -> None:
    """Measure `int8.product` for this number of rows, and keep the fastest configuration."""
    from . import int8

    device, problem, *_ = int8.plan_of(x, weight, out_dtype, False, None)
    mode, many = mode_of(x, True, None), [Operands(w, None, None, None) for w in copies(weight)]

    def calls(choice: Any) -> list[Call]:
        plan = int8.planned(device, problem, choice)
        return [partial(int8.run, x, mode, operands, plan) for operands in many]

    _tune(device, problem, calls)
    int8.forget()


def _tune(device: Device, problem: GemmProblem, calls: Callable[[Any], Sequence[Call]]) -> None:
    from . import selection

    best = ranked(selection.candidates(device, problem), calls)
    if best:
        selection.keep(device, problem, best[0][1])
