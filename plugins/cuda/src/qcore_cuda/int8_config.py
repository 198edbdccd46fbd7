"""Which kernel and which tile sizes serve an int8 product: an analytic default, legal for every shape and device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .device import Device


@dataclass(frozen=True)
class Config:
    """One way to compute a product; plain values, so that a table can hold it.

    **Fields:** ``kernel``: "slices" (few rows), "tiles" (any device) or "persistent" (tensor descriptors, sm_90 and
    later, int8 weights); ``bm``, ``bn``: the tile; ``warps``, ``stages``; ``group_m``: rows of tiles per band;
    ``swap``: N is the first dimension of the product; ``parts``: pieces in which a tile leaves; ``tma_store``,
    ``flatten``, ``specialize``: of "persistent"; ``per_sm``: programs per multiprocessor, 0 = one per tile; ``unpack``:
    int4 is unpacked to int8 first.
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


def default_config(device: Device, m: int, n: int, k: int, bits: int, grouped: bool, inner: int = 128) -> Config:
    """A legal choice for a product of ``(m, k)`` by ``(n, k)``; ``inner``: columns per step along K."""
    return _default(device, _bucket(m), n, k, bits, grouped, inner)


def _bucket(m: int) -> int:
    return min(4096, 1 << max(0, m - 1).bit_length())


@lru_cache(maxsize=4096)
def _default(device: Device, m: int, n: int, k: int, bits: int, grouped: bool, inner: int) -> Config:
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
        return Config("persistent", 128, 64 if m <= 256 else 128, 4, 4, tma_store=True, unpack=unpack)
    return Config("persistent", 128, 256, 8, 3, parts=2, tma_store=True, per_sm=1, unpack=unpack)
