"""Hints from decisions for similar requests: another dtype of x that a faster kernel supports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..contracts import Conv2dRequest, LinearRequest
from ..discovery.kernels import Rank
from ..errors import dtype_name
from ..runtime.settings import Settings
from .decision import Candidate, Decision
from .resolver import decide

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_WORTH = 1.2
"""The minimum measured speedup for which a hint suggests another dtype."""
_MEASURED = {
    ("torch.plain.linear", torch.float32, "torch.cpu.w4a16", torch.bfloat16): (
        21,
        "at one row of 4096 x 4096 with AVX-512 (benchmarks/results/2026-11-21-cpu-linear.md)",
    ),
}
"""Published speedups (factor, source) of one kernel over another, for machines without tuning records."""


def dtype_hint(decision: Decision, wanted: Settings) -> str:
    """A hint to use another dtype of x that a faster kernel supports, if plain torch ops were selected; else empty.

    Gives the speedup if ``qcore tune`` has measured both on this machine, or else that of a published benchmark.
    """
    request, chosen = decision.request, decision.selected
    if not isinstance(request, (LinearRequest, Conv2dRequest)) or request.x_dtype not in _DTYPES:
        return ""
    if chosen is None or not _is_plain(chosen):
        return ""
    better = [
        (*_gain(decision, request.x_dtype, found, dtype), dtype, found)
        for dtype, found in _others(request, wanted, chosen)
    ]
    if not better:
        return ""
    speedup, source, dtype, found = max(better, key=lambda gain: gain[0])
    current, suggested = (dtype_name(value) for value in (request.x_dtype, dtype))
    how = f"about {speedup:.0f} times as fast {source}" if speedup else "'qcore tune' measures how much faster it is"
    return (
        f"only plain torch ops support an x of {current} here; use {suggested}, which {found.kernel} supports: {how}."
    )


def _is_plain(candidate: Candidate) -> bool:
    return candidate.rank is not None and candidate.rank <= Rank.FALLBACK


def _others(
    request: LinearRequest | Conv2dRequest, wanted: Settings, chosen: Candidate
) -> Iterator[tuple[torch.dtype, Candidate]]:
    """Other dtypes of x with the better kernels that support them."""
    for dtype in _DTYPES:
        if dtype == request.x_dtype:
            continue
        out = dtype if request.out_dtype == request.x_dtype else request.out_dtype
        found = decide(replace(request, x_dtype=dtype, out_dtype=out), replace(wanted, strict=False)).selected
        if found is None or found.rank is None or chosen.rank is None or found.rank <= chosen.rank:
            continue
        times = (found.milliseconds, chosen.milliseconds)
        if times[0] is None or times[1] is None or times[0] * _WORTH < times[1]:
            yield dtype, found


def _gain(decision: Decision, current: torch.dtype, found: Candidate, dtype: torch.dtype) -> tuple[float, str]:
    """The speedup of ``found`` and where it was measured; 0 if it is unknown."""
    chosen = decision.selected
    assert chosen is not None
    if chosen.milliseconds and found.milliseconds:
        return chosen.milliseconds / found.milliseconds, "as measured on this machine"
    return _MEASURED.get((chosen.kernel, current, found.kernel, dtype), (0, ""))
