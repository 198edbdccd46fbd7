"""Measured times of kernels: ``qcore tune`` writes them, the resolver reads them.

A record holds milliseconds by row count, for one request (without row count), plugin version, kernel, device and
driver. For a request of unknown row count, the geometric mean over the measured row counts decides.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..contracts import LinearRequest, Request
from ..contracts.inputs import Draw, Shape
from ..discovery.answers import name_of
from ..discovery.kernels import Kernel
from ..discovery.registry import BUILTIN, PluginStatus
from ..runtime.disk_cache import read, records, write
from .decision import describe
from .verification import clean_torch_state

ROWS = (1, 16, 256)
"""The row counts measured by default: decoding, small batches, prompts."""

_known: dict[str, dict[int, float] | None] = {}
_MAX_KNOWN = 4096


@dataclass(frozen=True)
class Slow:
    """A plugin's kernel that was measured slower than the fallback: mean milliseconds over the row counts of each."""

    plugin: str
    kernel: str
    milliseconds: float
    fallback: str
    fallback_milliseconds: float
    request: str


def slower_than_fallback(installed: Iterable[PluginStatus]) -> list[Slow]:
    """The kernels of the ``installed`` plugins that the records of ``qcore tune`` show slower than the fallback."""
    versions = {status.name: (status.dist, status.version) for status in installed}
    fastest: dict[str, tuple[float, str]] = {}
    others: list[tuple[str, str, str, float]] = []
    for record in records("tuning"):
        times, labels = _times_of(record), [record.get(name) for name in ("request", "plugin", "kernel")]
        if not times or not all(isinstance(text, str) for text in labels):
            continue  # damaged, or written by an earlier version without these fields
        request, plugin, kernel = map(str, labels)
        if [*versions.get(plugin, ())] != [record.get("dist"), record.get("version")]:
            continue
        if plugin == BUILTIN:
            fastest[request] = min((_mean(times), kernel), fastest.get(request, (math.inf, "")))
        else:
            others.append((request, plugin, kernel, _mean(times)))
    return [
        Slow(plugin, kernel, ms, fastest[request][1], fastest[request][0], request)
        for request, plugin, kernel, ms in sorted(others)
        if request in fastest and ms > fastest[request][0]
    ]


def _mean(times: dict[int, float]) -> float:
    """The geometric mean: each row count has the same weight, however slow."""
    return math.exp(statistics.fmean(math.log(ms) for ms in times.values()))


@dataclass(frozen=True)
class Measurement:
    """Milliseconds of one kernel by row count; ``stored`` is False if the cache could not be written."""

    plugin: str
    kernel: str
    milliseconds: dict[int, float]
    stored: bool


def measured(request: Request, status: PluginStatus, kernel: Kernel) -> float | None:
    """The measured time for this request, in milliseconds; None if it was never tuned."""
    if not isinstance(request, LinearRequest):
        return None
    key = _key(request, status, kernel)
    if key not in _known:
        if len(_known) >= _MAX_KNOWN:  # unbounded sizes; measured times stay, since they may not be on disk
            for other in [other for other, times in _known.items() if not times]:
                del _known[other]
        _known[key] = _times_of(read("tuning", key))
    times = _known[key]
    if not times:
        return None
    rows = request.rows
    return _mean(times) if rows is None else times[min(times, key=lambda m: abs(m - rows))]


def _times_of(record: dict[str, Any] | None) -> dict[int, float] | None:
    """Milliseconds by row count; None for a record that is missing or damaged."""
    try:
        times = {int(m): float(ms) for m, ms in (record or {})["milliseconds"].items()}
    except (KeyError, AttributeError, TypeError, ValueError):
        return None
    return times if all(0 < ms < math.inf for ms in times.values()) else None


def _key(request: LinearRequest, status: PluginStatus, kernel: Kernel) -> str:
    anonymous = replace(request, rows=None, bias=False, training=False)
    fields = (
        status.name,
        status.dist,
        status.version,
        name_of(kernel),
        status.device,
        status.driver,
        torch.__version__,
    )
    return "|".join(map(str, (*fields, request.device, request.n, request.k, anonymous.signature())))


def measure(
    request: LinearRequest,
    offers: Iterable[tuple[PluginStatus, Kernel]],
    rows: Iterable[int] = ROWS,
    seconds: float = 0.3,
) -> list[Measurement]:
    """Time every kernel at the full size of the request, for each number of ``rows``, and store the times."""
    offers, found = list(offers), []
    with clean_torch_state():
        timings = {m: _times(replace(request, rows=None), [k for _, k in offers], m, seconds) for m in rows}
    for index, (status, kernel) in enumerate(offers):
        times = {m: timings[m][index] for m in timings}
        key = _key(request, status, kernel)
        _known[key] = times
        about = {"plugin": status.name, "dist": status.dist, "version": status.version, "kernel": name_of(kernel)}
        figures = {str(m): ms for m, ms in times.items()}
        stored = write("tuning", key, milliseconds=figures, request=describe(request), **about)
        found.append(Measurement(status.name, name_of(kernel), times, stored))
    return found


def _times(request: LinearRequest, kernels: list[Kernel], rows: int, seconds: float) -> list[float]:
    shape = Shape("tune", (rows,), request.n, request.k, "same" if request.bias else "none")
    problem = Draw(torch.Generator().manual_seed(0)).linear(request, shape)
    here = problem.to(request.device)
    calls: list[Callable[[], Any]] = []
    for kernel in kernels:
        packed = kernel.pack(here.weight)
        kernel.tune(here.x, packed, here.bias, **here.given)
        calls.append(partial(kernel, here.x, packed, here.bias, **here.given))
    return interleaved_medians(calls, request.device, seconds)


def interleaved_medians(calls: list[Callable[[], Any]], device: torch.device, seconds: float = 0.3) -> list[float]:
    """Median milliseconds of each call.

    The calls are interleaved, so that a slow moment of the machine affects all equally, in a new order each round, so
    that no call always runs with the caches left by the same predecessor.
    """
    if not calls:
        return []
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    deadline = time.perf_counter() + seconds * max(1, len(calls))
    turns, shuffle = list(zip(calls, times, strict=True)), random.Random(0).shuffle  # noqa: S311 - nothing secret
    while time.perf_counter() < deadline or len(times[0]) < 5:
        shuffle(turns)
        for call, own in turns:
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            own.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(own) for own in times]


def synchronize(device: torch.device) -> None:
    """Wait for the device if it runs asynchronously."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize()
