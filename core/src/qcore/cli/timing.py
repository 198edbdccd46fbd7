"""Time measurements of ``qcore bench``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ..contracts import Problem
from ..contracts.inputs import Draw, Shape
from ..discovery.kernels import Kernel
from ..discovery.registry import BUILTIN
from ..resolving.tuning import interleaved_medians, synchronize
from ..resolving.verification import clean_torch_state
from .measuring import Case

_PROBE_BYTES = 1 << 28
"""Larger than the caches of most machines."""


def bandwidth(device: torch.device, tries: int = 5) -> float:
    """Read bandwidth of the device in bytes per second: the best of ``tries`` sums over a large tensor."""
    with clean_torch_state():
        block = torch.zeros(_PROBE_BYTES // 4, dtype=torch.float32, device=device)
        return _PROBE_BYTES / min(_seconds(block.sum, device) for _ in range(tries))


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def time_case(case: Case, rows: int, seconds: float, speed: float) -> list[dict[str, Any]]:
    """A row for each kernel of ``case`` at ``rows`` rows of x; ``speed``: memory bandwidth in bytes per second."""
    request = case.request
    with clean_torch_state():
        problem = Draw(torch.Generator().manual_seed(0)).linear(request, Shape("bench", (rows,), request.n, request.k))
        here = problem.to(request.device)
        packs = [kernel.pack(here.weight) for _, kernel in case.kernels]
        calls = [_call(kernel, here, packed) for (_, kernel), packed in zip(case.kernels, packs, strict=True)]
        dense, *times = interleaved_medians([_dense(here), *calls], request.device, seconds)
    activation_bytes = rows * (request.k * request.x_dtype.itemsize + request.n * request.out_dtype.itemsize)
    return [
        _row(case.scheme, rows, kernel.name, (ms, dense), _bytes(kernel, packed), activation_bytes, speed)
        | {"plugin": status.name}
        for (status, kernel), packed, ms in zip(case.kernels, packs, times, strict=True)
    ]


def slow_notes(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each plugin's kernel that took longer than the fallback, for the same scheme and rows."""
    own = sorted((row for row in rows if row["plugin"] == BUILTIN), key=lambda row: -row["milliseconds"])
    fallback = {(row["scheme"], row["m"]): row for row in own}  # the fastest comes last and wins
    pairs = [(row, fallback.get((row["scheme"], row["m"]))) for row in rows if row["plugin"] != BUILTIN]
    return [
        f"slower than the fallback: {row['kernel']} for {row['scheme']}, {row['m']} rows: "
        f"{row['milliseconds']:.3g} ms, {best['kernel']} {best['milliseconds']:.3g} ms; "
        f"run 'qcore tune' to have the faster one selected"
        for row, best in pairs
        if best and row["milliseconds"] > best["milliseconds"]
    ]


def _call(kernel: Kernel, here: Problem, packed: dict[str, torch.Tensor]) -> Callable[[], Any]:
    return lambda: kernel(here.x, packed, here.bias, **here.given)


def _dense(here: Problem) -> Callable[[], Any]:
    """The dense layer for comparison: same dtype as x (bfloat16 if x arrives as int8 codes)."""
    dtype = here.x.dtype if here.x.is_floating_point() else torch.bfloat16
    x, weight = here.x.to(dtype), here.weight.dequantize(dtype)
    return lambda: F.linear(x, weight)


def _bytes(kernel: Kernel, packed: dict[str, torch.Tensor]) -> int:
    return sum(map(kernel.nbytes, packed.values()))


def _row(
    scheme: str, m: int, kernel: str, times: tuple[float, float], weight: int, activation_bytes: int, speed: float
) -> dict[str, Any]:
    ms, dense = times
    moved = (weight + activation_bytes) / (ms / 1e3)
    return {
        "scheme": scheme,
        "m": m,
        "kernel": kernel,
        "milliseconds": ms,
        "dense_milliseconds": dense,
        "ratio": dense / ms,
        "weight_bytes": weight,
        "bytes_per_second": moved,
        "of_bandwidth": moved / speed,
    }
