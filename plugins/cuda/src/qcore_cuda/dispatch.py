"""Which kernel and which tile sizes serve a product, by its number of rows: what was measured, else a rule.

In order: what ``qcore tune`` measured on this machine for this size and number of rows; the nearest size in the table
shipped for this architecture (``tables/sm_90.json``); an analytic rule that is legal everywhere. Nothing is measured
while a model runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import large
from .device import Device

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Config:
    """One way to compute a product with float activations; plain values, so that a table can hold it.

    **Fields:** ``kernel``: "gemv" (few rows, NVIDIA), "slices" (int8, few rows), "gemm" (any), "mixed" (many rows, see
    `large`) or "dense" (dequantize, then torch's product); ``bn``, ``bm``: the tile, of weight rows and tokens (gemv:
    rows of a program; mixed: ``bm`` alone); ``warps``, ``stages``; ``unroll``, ``late``: of gemv, see `few.Shape`;
    ``split``: programs that share K, of gemm. Of gemm: ``unroll``: times 128 columns in a step; ``scaled``:
    weights are scaled before the product, not sums after it; ``even``: programs per multiprocessor, over which all
    tiles are spread evenly instead; ``registers``: of a thread, at most.
    """

    kernel: str
    bn: int = 0
    bm: int = 0
    warps: int = 4
    stages: int = 1
    unroll: int = 1
    late: bool = False
    scaled: bool = False
    split: int = 1
    even: int = 0
    registers: int = 0


@dataclass(frozen=True)
class Problem:
    """What a choice depends on.

    **Fields:** ``rows``: `bucket` of M; ``block``: see `Weight.block`; ``narrow``: x is bfloat16 or float16;
    ``exact``: a weight must not be rounded to x's dtype (float16, whose small numbers are coarse, or a result wider
    than x); ``whole``: scales may come after the sum over all of K (one group, no float zero point), the result has x's
    dtype.
    """

    bits: int
    n: int
    k: int
    rows: int
    block: int
    narrow: bool = True
    exact: bool = False
    whole: bool = False


_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def bucket(m: int) -> int:
    """M rounded up to the next power of two, at most 2048: the row counts that choices are made for."""
    return next((b for b in _BUCKETS if m <= b), _BUCKETS[-1])


@lru_cache(maxsize=8192)
def choose(device: Device, problem: Problem) -> Config:
    """The choice for a product with float activations, legal for it."""
    measured = itertools.chain(_tuned(device, problem), _shipped(device, problem))
    return next((config for config in measured if legal(device, problem, config)), rule(device, problem))


def legal(device: Device, problem: Problem, config: Config) -> bool:
    """Whether a configuration, measured for another problem, can serve this one."""
    if config.kernel == "gemv":
        return device.asm and problem.narrow and problem.rows <= 16
    if config.kernel == "slices":
        return problem.bits == 8 and problem.narrow
    if config.kernel == "dense":
        return problem.narrow and not problem.exact
    if config.kernel == "mixed":
        return large.serves(device, problem)
    return config.kernel == "gemm" and not (config.scaled and problem.exact)


def rule(device: Device, problem: Problem) -> Config:
    """A legal choice for any problem on any device."""
    m, n = problem.rows, problem.n
    if m <= 16 and device.asm and problem.narrow:
        return _gemv(*few_rule(device, problem.bits, n, m))
    if problem.bits == 8 and m <= 16 and problem.narrow:
        return Config("slices", 16 if n <= 64 * device.sms else 32, 16 if m > 8 or device.hip else 8, stages=4)
    if m >= 256 and large.serves(device, problem):
        return _mixed(device, problem)
    if m >= 1024 and legal(device, problem, Config("dense")):
        return Config("dense")
    if m >= 256 and not problem.exact:
        return Config("gemm", 128, 128, warps=8, stages=3, scaled=True)
    bm = min(64, max(16, m))
    tiles = math.ceil(n / 64) * math.ceil(m / bm)
    split = max(1, min(8, 2 * device.sms // max(1, tiles), problem.k // 512))
    return Config("gemm", 64, bm, stages=4 if m <= 32 else 3, split=1 << (split.bit_length() - 1))


def candidates(device: Device, problem: Problem) -> list[Config]:
    """What ``qcore tune`` measures for a problem: a few dozen configurations that have ever been fastest anywhere."""
    m, found = problem.rows, [rule(device, problem)]
    if m <= 16 and device.asm:
        found += [_gemv(*shape, late) for shape in _GEMV[problem.bits, few_rows(m)] for late in (False, True)]
    elif m <= 16:
        found += [
            Config("slices", bn, max(8, min(16, m)), warps=warps, stages=stages)
            for bn in (16, 32)
            for warps in (4, 8)
            for stages in (3, 4, 6)
        ]
    if m > 16:
        shapes = (shape for shape in _GEMM if shape.bm <= max(32, m) and shape.bm * 4 >= min(m, 1024))
        found += [config for shape in shapes for config in _spread(device, problem, shape)]
    if m >= 64:
        found += [*(Config("mixed", bm=bm) for bm in large.MIXED if bm <= m), Config("dense")]
    return [c for c in dict.fromkeys(found) if legal(device, problem, c)]


def _spread(device: Device, problem: Problem, shape: Config) -> Iterator[Config]:
    """A shape of gemm with the ways to spread its tiles: K is split while they are few, else all is spread evenly."""
    tiles, most = math.ceil(problem.n / shape.bn) * math.ceil(problem.rows / shape.bm), (12 // shape.warps) * device.sms
    for split in (1, 2, 4, 8):
        if split == 1 or device.sms <= 2 * tiles * split <= 2 * most:
            yield replace(shape, split=split)
    if tiles > device.sms:
        yield from (replace(shape, even=even) for even in (1, 2) if tiles % (even * device.sms))


def _mixed(device: Device, problem: Problem) -> Config:
    """The tile for which programs have the least to do."""

    def time(bm: int) -> float:
        tiles = math.ceil(problem.n / 128) * math.ceil(problem.rows / bm)
        return large.shares(tiles, math.ceil(problem.k / 128), bm, device)[0]

    return Config("mixed", bm=min(large.MIXED, key=time))


def _gemv(row_blocks: int, unroll: int, warps: int, stages: int, late: bool = False) -> Config:
    return Config("gemv", 16 * row_blocks, warps=warps, stages=stages, unroll=unroll, late=late)


def few_rows(m: int) -> int:
    """1, 8 or 16: what kernels for few rows distinguish."""
    return 1 if m == 1 else 8 if m <= 8 else 16


def few_rule(device: Device, bits: int, n: int, m: int) -> tuple[int, int, int, int]:
    """A good shape (see `few.Shape`) of a product with few rows, for any device."""
    wide = n > 64 * device.sms
    if m == 1:
        return (2 if wide else 1, 2, 4, 3) if bits == 4 else (1, 4, 4, 2)
    if bits == 8:
        return (4, 1, 4, 2) if wide and m > 8 else (2, 2, 4, 2)
    return (4, 1, 4, 3) if wide else (2, 1, 8, 2)


_GEMV = {
    (4, 1): (
        (2, 1, 8, 3), (2, 1, 8, 2), (2, 1, 4, 4), (2, 2, 4, 2), (2, 2, 4, 3), (2, 2, 8, 2), (4, 1, 8, 2), (4, 1, 4, 2),
        (1, 2, 4, 3), (1, 2, 4, 4), (1, 4, 4, 2), (1, 4, 8, 2),
    ),
    (4, 8): ((1, 1, 8, 3), (2, 1, 8, 2), (2, 1, 8, 3), (2, 2, 4, 2), (4, 1, 4, 2), (4, 1, 4, 3), (4, 1, 8, 2)),
    (4, 16): (
        (2, 1, 8, 2), (2, 2, 8, 2), (4, 1, 2, 2), (4, 1, 4, 2), (4, 1, 4, 3), (4, 1, 8, 2), (4, 2, 4, 2),
    ),
    (8, 1): (
        (1, 8, 4, 2), (1, 4, 2, 4), (1, 4, 4, 2), (1, 4, 4, 4), (1, 4, 4, 3), (1, 2, 4, 3), (1, 2, 4, 4), (1, 2, 8, 3),
        (1, 4, 8, 2), (2, 2, 4, 3),
    ),
    (8, 8): ((1, 2, 8, 2), (1, 4, 4, 2), (2, 2, 4, 2), (2, 2, 4, 3), (2, 2, 8, 2), (4, 2, 4, 2)),
    (8, 16): ((2, 2, 4, 2), (2, 2, 8, 2), (4, 1, 4, 2), (4, 1, 8, 3), (4, 2, 4, 2), (8, 1, 4, 2)),
}  # fmt: skip
"""Shapes of `few.Shape` by bits and `few_rows`: each has been the fastest for some size."""
_GEMM = (
    *(Config("gemm", bn, bm, warps, stages, scaled=True) for bn, bm, warps, stages in (
        (64, 32, 4, 4), (128, 32, 8, 5), (64, 64, 4, 4), (256, 64, 8, 3), (64, 128, 4, 3), (128, 128, 8, 3),
        (128, 256, 8, 3),
    )),
    *(Config("gemm", bn, bm, warps, stages, unroll=2, scaled=True) for bn, bm, warps, stages in (
        (64, 32, 4, 4), (64, 64, 4, 3), (128, 64, 8, 3),
    )),
    Config("gemm", 128, 32, 8, 4, unroll=2, scaled=True, registers=128),
    Config("gemm", 128, 64, 8, 3, scaled=True, registers=128),
    *(Config("gemm", bn, bm, warps, 4) for bn, bm, warps in ((64, 32, 4), (128, 32, 8), (64, 64, 4))),
)  # fmt: skip
"""Shapes of gemm: each has been the fastest for some size, or is the fastest of those that do not scale weights."""


# Tables: what was measured, by architecture; records are flat, so that they diff well.


@lru_cache(maxsize=8)
def _table(arch: int, name: str) -> dict[tuple[int, int], list[tuple[int, int, dict[str, Any]]]]:
    """(bits, rows) -> [(n, k, fields of a configuration)]."""
    path = _HERE / "tables" / f"sm_{arch}.json"
    if not path.exists():
        return {}
    found: dict[tuple[int, int], list[tuple[int, int, dict[str, Any]]]] = {}
    for record in json.loads(path.read_text("utf-8")).get(name, []):
        found.setdefault((record["bits"], record["rows"]), []).append((record["n"], record["k"], record["config"]))
    return found


def nearest(device: Device, name: str, bits: int, rows: int, n: int, k: int) -> list[dict[str, Any]]:
    """The fields of the configurations in table ``name``, those measured for sizes near ``(n, k)`` first.

    A number of rows that was not measured goes by the next larger one that was.
    """
    table = _table(device.arch, name) if device.arch else {}
    measured = sorted(m for b, m in table if b == bits and m >= rows)
    sizes = table[bits, measured[0]] if measured else []
    near = sorted(sizes, key=lambda s: abs(math.log(s[0] / n)) + 0.5 * abs(math.log(s[1] / max(k, 1))))
    return [fields for _, _, fields in near]


def _shipped(device: Device, problem: Problem) -> Iterator[Config]:
    if problem.bits == 4 and problem.block != 128 and problem.rows > 16:
        return  # what was measured reads 16 bytes at a time; kernels for few rows take more of smaller blocks
    for fields in nearest(device, "float", problem.bits, problem.rows, problem.n, problem.k):
        yield Config(**fields)


# What `qcore tune` measured here; versioned by what compiles and what is compiled.


@lru_cache(maxsize=1)
def version() -> str:
    """A hash of the plugin's source and Triton's version: measurements of another one do not count."""
    import triton

    digest = hashlib.sha256(triton.__version__.encode())
    for path in sorted(_HERE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _key(device: Device, problem: Any) -> str:
    return f"{version()}|{tuple(device)}|{sorted(asdict(problem).items())}"


def tuned(kind: str, device: Device, problem: Any) -> dict[str, Any] | None:
    """The fields of the configuration that was measured on this machine for a problem (a dataclass), if one was."""
    from qcore.plugin_api import read_record

    record = read_record(f"cuda-{kind}", _key(device, problem))
    fields = (record or {}).get("config")
    return fields if isinstance(fields, dict) else None


def keep(kind: str, device: Device, problem: Any, config: Any) -> bool:
    """Keep a measured choice on disk (atomically), for every process that starts from now on; whether that worked."""
    from qcore.plugin_api import write_record

    return write_record(f"cuda-{kind}", _key(device, problem), config=asdict(config))


def _tuned(device: Device, problem: Problem) -> Iterator[Config]:
    fields = tuned("float", device, problem)
    with contextlib.suppress(TypeError):  # written by hand, or damaged
        if fields:
            yield Config(**fields)
