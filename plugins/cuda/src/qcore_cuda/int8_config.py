"""Which kernel and which tile sizes serve an int8 product: an analytic default, legal for every shape and device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from . import hopper, large
from .device import Device
from .dispatch import few_rows, few_rule, nearest, tuned


@dataclass(frozen=True)
class Config:
    """One way to compute a product; plain values, so that a table can hold it.

    **Fields:** ``kernel``: "gemv" (few rows, NVIDIA), "slices" (few rows), "tiles" (any device), "persistent" (tensor
    descriptors, sm_90 and later, int8 weights), "specialized" (see `hopper`) or "fours" (see `large`); ``bm``, ``bn``:
    the tile; ``warps``, ``stages``: not of the last two; ``group_m``: rows of tiles per band; ``swap``: N is the first
    dimension of the product; ``parts``: pieces in which a tile leaves; ``tma_store``, ``flatten``, ``specialize``: of
    "persistent"; ``per_sm``: programs per multiprocessor, 0 = one per tile; ``unpack``: int4 is unpacked to int8 first;
    ``unroll``, ``late``: of gemv, see `few.Shape`.
    """

    kernel: str
    bm: int
    bn: int
    warps: int
    stages: int
    group_m: int = 8
    swap: bool = False
    parts: int = 1
    tma_store: bool = False
    flatten: bool = False
    specialize: bool = False
    per_sm: int = 0
    unpack: bool = False
    unroll: int = 1
    late: bool = False


@dataclass(frozen=True)
class Problem:
    """What a choice depends on: ``rows`` as `dispatch.bucket` gives them; ``inner``: columns per step along K."""

    bits: int
    n: int
    k: int
    rows: int
    grouped: bool
    inner: int


@lru_cache(maxsize=8192)
def choose(device: Device, problem: Problem, specialized: bool = True) -> Config:
    """What ``qcore tune`` measured here, else the nearest size of the table for this architecture, else the default.

    The rule for "specialized" and "fours" goes before the table. ``specialized``: those kernels can be chosen.
    """
    usual = problem.inner == 128 and problem.grouped == (problem.bits == 4)  # what the tables are measured with
    shipped = nearest(device, "int8", problem.bits, problem.rows, problem.n, problem.k) if usual else []
    own = (_specialized(device, problem) or _fours(device, problem)) if specialized else None
    for fields in (tuned("int8", device, problem), *(shipped[:1] if own is None else ())):
        config = _read(fields) if fields else None
        if config and (own or config.kernel not in {"specialized", "fours"}):  # measured for a neighbour it serves
            return config
    return own or default_config(device, problem)


_WAVES = {256: 1.0, 128: 0.54, 64: 0.37}
"""What a tile of 128 rows and so many columns takes, all multiprocessors being busy."""


def _specialized(device: Device, p: Problem) -> Config | None:
    """The tile with which the last wave wastes least."""
    if p.bits == 4 or p.grouped or p.rows <= 64 or not hopper.serves(device, p.n, p.inner):
        return None

    def cost(bn: int) -> float:
        tiles = -(-p.rows // 128) * -(-p.n // bn)
        return -(-tiles // device.sms) * _WAVES[bn]

    return Config("specialized", 128, min(_WAVES, key=cost), 4, 0, group_m=16)


_FOURS = {128: 1.0, 64: 0.7, 32: 0.5}
"""Tokens of a tile of `fours`: the time that one takes."""


def _fours(device: Device, p: Problem) -> Config | None:
    """The tile for which programs have the least to do, in rounds of one tile each."""
    if p.bits == 8 or p.rows <= 32 or not large.serves_fours(device, p.n, p.inner):
        return None

    def cost(bm: int) -> float:
        tiles = -(-p.rows // bm) * -(-p.n // 128)
        return -(-tiles // device.sms) * _FOURS[bm]

    return _four(min(_FOURS, key=cost))


def _four(bm: int) -> Config:
    return Config("fours", bm, 128, 4, 0)


def _read(fields: dict[str, Any]) -> Config | None:
    try:
        config = Config(**fields)
    except TypeError:  # written by hand, or damaged
        return None
    return config if config.kernel in {"gemv", "slices", "tiles", "persistent", "specialized", "fours"} else None


def candidates(device: Device, problem: Problem) -> list[Config]:
    """What ``qcore tune`` measures for a problem."""
    m, four = problem.rows, problem.bits == 4
    found = [default_config(device, problem)]
    if m <= 16 and device.asm:
        found += [_gemv(*shape, late) for shape in _GEMV[problem.bits, few_rows(m)] for late in (False, True)]
    elif m <= 64:
        sizes = ((16, 4), (16, 8), (32, 4), (32, 8))
        found += [Config("slices", max(8, min(32, m)), bn, w, st) for bn, w in sizes for st in (2, 3, 4, 6)]
    if m > 16:
        few = (32, 64) if m <= 128 else (64, 128)
        found += [Config("tiles", bm, bn, 4, st, swap=True) for bm in few for bn in (64, 128) for st in (3, 4)]
    if m >= 128:
        found += [Config("tiles", *tile, swap=four) for tile in ((128, 128, 8, 3), (128, 256, 8, 3), (64, 128, 4, 4))]
    if m >= 128 and device.descriptors:
        found += [_persistent(four, *tile) for tile in _PERSISTENT if tile[0] <= 2 * m]
    if _fours(device, problem):
        found += [_four(bm) for bm in _FOURS if bm <= m]
    if _specialized(device, problem):
        found += [Config("specialized", 128, bn, 4, 0, group_m=band) for bn in _WAVES for band in (8, 16)]
    return list(dict.fromkeys(found))


def _gemv(row_blocks: int, unroll: int, warps: int, stages: int, late: bool = False) -> Config:
    return Config("gemv", 0, 16 * row_blocks, warps, stages, unroll=unroll, late=late)


_GEMV = {
    (4, 1): (
        (1, 4, 8, 2), (2, 2, 8, 2), (2, 2, 4, 2), (2, 1, 8, 2), (2, 1, 8, 3), (2, 2, 4, 3), (2, 1, 4, 3), (1, 4, 4, 2),
        (1, 2, 8, 3), (4, 1, 4, 2),
    ),
    (4, 8): ((1, 2, 4, 2), (1, 1, 8, 2), (2, 1, 4, 3), (4, 1, 4, 2), (2, 1, 8, 2), (2, 2, 4, 2)),
    (4, 16): ((2, 1, 8, 2), (2, 1, 8, 3), (2, 2, 4, 2), (4, 1, 8, 2), (4, 1, 4, 3), (4, 1, 2, 3)),
    (8, 1): ((1, 2, 8, 3), (1, 4, 8, 2), (1, 2, 4, 3), (2, 2, 8, 2), (1, 4, 4, 3), (1, 4, 4, 2), (2, 1, 8, 2)),
    (8, 8): ((1, 2, 4, 2), (2, 2, 4, 2), (1, 2, 8, 2), (1, 4, 4, 2), (2, 1, 4, 3)),
    (8, 16): ((1, 2, 4, 2), (1, 2, 8, 2), (2, 2, 4, 2), (2, 2, 8, 2), (4, 1, 4, 2), (1, 4, 4, 2)),
}  # fmt: skip
"""Shapes of `few.Shape` by bits and `few_rows`: each has been the fastest for some size."""


_PERSISTENT = (
    (128, 64, 4, 4, 1, 0, 8), (64, 128, 4, 4, 1, 0, 8), (128, 128, 4, 3, 2, 0, 8), (128, 128, 4, 4, 1, 0, 8),
    (128, 128, 8, 4, 1, 0, 8), (128, 256, 8, 3, 2, 0, 8), (128, 256, 8, 3, 2, 1, 8), (128, 256, 8, 4, 2, 1, 8),
    (128, 128, 4, 4, 2, 0, 8), (128, 128, 4, 3, 2, 2, 8), (128, 128, 4, 3, 2, 0, 16), (128, 128, 4, 3, 1, 0, 8),
    (128, 256, 8, 3, 2, 1, 16), (128, 256, 8, 4, 2, 1, 16), (256, 128, 8, 3, 2, 1, 8), (256, 128, 8, 4, 2, 1, 16),
)  # fmt: skip


def _persistent(unpack: bool, bm: int, bn: int, warps: int, stages: int, parts: int, per_sm: int, band: int) -> Config:
    options = {"parts": parts, "per_sm": per_sm, "group_m": band, "tma_store": True, "unpack": unpack}
    return Config("persistent", bm, bn, warps, stages, **options)  # type: ignore[arg-type]


def default_config(device: Device, p: Problem) -> Config:
    """A legal choice for a problem."""
    m, n, k, bits, grouped, inner = p.rows, p.n, p.k, p.bits, p.grouped, p.inner
    if m <= 16 and device.asm:
        return _gemv(*few_rule(device, bits, n, m))
    if m <= 32:
        return _few(device, m, n, k, bits, inner)
    if m <= 128:
        return Config("tiles", 64, 64, 4, 2 if device.hip else 4, swap=True)
    # Where N is no multiple of 16, rows of the result are written value by value, which takes registers.
    return (
        _by_descriptors(device, m, n, bits, grouped)
        if device.descriptors and n % 16 == 0
        else _by_pointers(device, n, bits, grouped)
    )


def _few(device: Device, m: int, n: int, k: int, bits: int, inner: int) -> Config:
    bm = max(16 if device.hip else 8, m)
    bn = 32 if n >= 32 * 4 * device.sms and bm <= 16 else 16
    warps = 8 if k >= 32 * inner and n < 16 * 8 * device.sms else 4

    def stages(warps: int) -> int:
        return device.shared // (warps * inner * (bn * bits // 8 + bm))

    warps = warps if stages(warps) >= 3 else 4
    return Config("slices", bm, bn, warps, max(1, min(2 if device.hip else 4, stages(warps))))


def _by_pointers(device: Device, n: int, bits: int, grouped: bool) -> Config:
    small = grouped or n % 16 != 0
    return Config("tiles", 128, 64 if small else 128, 4 if small else 8, 2 if device.hip else 3, swap=bits == 4)


def _by_descriptors(device: Device, m: int, n: int, bits: int, grouped: bool) -> Config:
    unpack = bits == 4
    if grouped:
        return Config("persistent", 128, 128, 8, 3, tma_store=True, unpack=unpack)
    if m * n <= 128 * 128 * device.sms:
        bn = 64 if m <= 256 else 128
        warps = 8 if bn == 128 and device.arch >= 100 else 4  # what fits the registers
        return Config("persistent", 128, bn, warps, 4, tma_store=True, unpack=unpack)
    return Config("persistent", 128, 256, 8, 3, parts=2, tma_store=True, per_sm=1, unpack=unpack)
