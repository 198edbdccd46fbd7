"""Whether a layer was measured to be faster by the built-in kernels, on processors with this instruction set.

``tables/ISA.json``, which ``benchmarks/cpu_rank.py --table`` writes, holds the time of the built-in kernel over that of
the plugin's for some sizes, schemes and numbers of rows. The nearest measured layer decides, by the geometric mean over
its rows: a layer is bound once, and serves one row and many. ``qcore tune`` measures the layers themselves, and its
times come before every rank.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import qcore
from qcore import FALLBACK, NATIVE, EmbeddingRequest, Format
from qcore.plugin_api import Activation, AnyRequest

_HERE = Path(__file__).parent / "tables"
_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}
_PLAIN = "torch.plain"
_ONE_GROUP = 8.0
"""Distance between scales per channel and scales per group: other kernels serve them."""


@dataclass(frozen=True)
class Cell:
    """One measured layer.

    **Fields:** ``contract``; ``x``: dtype of x, of the result for an embedding; ``scheme``; ``n``, ``k``: of the
    weight; ``threads``; ``against``: the built-in kernel; ``ratios``: its time over the plugin's, by rows.
    """

    contract: str
    x: str
    scheme: str
    n: int
    k: int
    threads: int
    against: str
    ratios: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The geometric mean of the ratios: above 1 the plugin is faster."""
        return math.exp(statistics.fmean(map(math.log, self.ratios)))


@lru_cache(maxsize=8)
def cells(isa: str) -> tuple[Cell, ...]:
    """What was measured with an instruction set; empty if nothing was."""
    path = _HERE / f"{isa}.json"
    if not path.exists():
        return ()
    return tuple(read_cells(json.loads(path.read_text("utf-8"))["cells"]))


def read_cells(lines: Iterable[dict[str, Any]]) -> Iterable[Cell]:
    """Cells from lines of a table."""
    for line in lines:
        yield Cell(**{**line, "ratios": tuple(line["ratios"].values())})


def nearest(request: AnyRequest, threads: int, measured: Iterable[Cell]) -> Cell | None:
    """The measured layer most like a request; None if none has its contract, dtype, element and activation."""
    alike = [cell for cell in measured if _is_alike(cell, request)]
    return min(alike, key=lambda cell: _distance(cell, request, threads), default=None)


def rank(request: AnyRequest, isa: str, threads: int) -> tuple[int, str]:
    """The rank of an offer, and a sentence about it if a table made it yield."""
    cell = nearest(request, threads, cells(isa))
    if cell is None or cell.mean >= 1:
        return NATIVE, ""
    # Built-in kernels other than plain torch ops rank 10 and more above FALLBACK.
    lowered = FALLBACK - 5 if cell.against.startswith(_PLAIN) else FALLBACK + 5
    return lowered, f"measured {cell.mean:.2f} times as fast as {cell.against} with {isa}"


def _is_alike(cell: Cell, request: AnyRequest) -> bool:
    dtype = request.out_dtype if isinstance(request, EmbeddingRequest) else request.x_dtype
    if cell.contract != request.contract or cell.x != _DTYPES.get(dtype):
        return False
    weight, activation = _parsed(cell.scheme)
    own: Activation | None = getattr(request, "activation", None)
    same = (weight.element, weight.zero) == (request.weight.element, request.weight.zero)
    return same and _kind(activation) == _kind(own)


def _kind(activation: Activation | None) -> tuple[Any, ...]:
    return type(activation), getattr(activation, "symmetric", None), getattr(activation, "per_token", None)


def _distance(cell: Cell, request: AnyRequest, threads: int) -> tuple[float, float, float]:
    """How far a measured layer is from a request: first by threads, then by groups and size, in factors of two."""
    weight, _ = _parsed(cell.scheme)
    group, wanted = weight.group(cell.k), request.weight.group(request.k)
    if (group >= cell.k) != (wanted >= request.k):
        groups = _ONE_GROUP
    else:
        groups = 0.0 if group >= cell.k else abs(math.log2(group / wanted))
    size = abs(math.log2(cell.n * cell.k / (request.n * request.k)))
    shape = abs(math.log2(cell.n / request.n))  # among equal sizes
    return abs(math.log2(cell.threads / threads)), groups + size / 2, shape


@lru_cache(maxsize=256)
def _parsed(scheme: str) -> tuple[Format, Activation | None]:
    parsed = qcore.Scheme.parse(scheme)
    return parsed.weight, parsed.activation
