"""Which kernel multiplies the rows of several experts, and how: by rules from measurements of an H200."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from qcore_triton.weights import NO_ZERO

from ..problem import GemmProblem
from ..products.gemm import Tile
from ..runtime.device import Device
from . import few, hopper
from .few import Few
from .hopper import Many
from .problem import GroupedProblem

_FEW = 8
"""Rows per expert up to which `Few` is fastest where `Many` are served; `Tile` is behind both."""


@lru_cache(maxsize=8192)
def choose(device: Device, problem: GroupedProblem) -> Few | Tile | Many:
    """The configuration for a problem, by rows per expert, and so the kernel: many, few, or on any device."""
    rows = problem.gemm.rows
    if hopper.serves(device, problem) and rows > _FEW:
        return _many(problem.gemm)
    if few.serves(device, problem) and rows <= 2 * _FEW:
        return _few(device, problem)
    return tile_rule(device, problem)


def _many(gemm: GemmProblem) -> Many:
    """Tiles of more rows than an expert has on average, as many experts have more; of 64, if that is not too few.

    To unpack a weight with parameters of small groups again, for another tile, takes longer than half a tile of zeros.
    """
    rows, plain = gemm.rows, gemm.zero == NO_ZERO and (gemm.one_group or gemm.group % 128 == 0)
    return Many(32 if rows <= 16 else 64 if rows <= 32 or (plain and rows <= 64) else 128 if rows <= 128 else 256)


def _few(device: Device, problem: GroupedProblem) -> Few:
    rows, bits = problem.gemm.rows, problem.gemm.bits
    if bits == 8:
        return Few(8 if rows <= _FEW // 2 else 16, 2, 2, 2, 3)
    small = problem.busy * problem.gemm.n < 3 * 64 * device.sms
    return Few(8 if rows <= _FEW else 16, *((2, 2, 4, 2) if small else (4, 1, 4, 2)))


def tile_rule(device: Device, problem: GroupedProblem) -> Tile:
    """The tile for a problem: as many rows as an expert has on average, up to 64 or 128."""
    gemm, scaled = problem.gemm, problem.scaled
    if not gemm.narrow:
        return Tile(64, 32 if device.arch == 90 and gemm.rows > 16 else 16, stages=3, scaled=gemm.halves)
    if device.hip:  # registers do not suffice for scaled weights
        return Tile(64, min(64, max(16, gemm.rows)), stages=2, scaled=gemm.halves)
    if device.arch != 90:
        return Tile(64, min(64, max(16, gemm.rows)), stages=3, scaled=scaled)
    if gemm.rows <= 16:
        return Tile(64, 16, stages=4, unroll=2, scaled=scaled)
    if gemm.rows <= 32:
        return Tile(64, 32, stages=4, scaled=scaled)
    return Tile(128, 128, 8, 3, scaled=True) if gemm.rows > 64 and scaled else Tile(64, 64, stages=4, scaled=scaled)


def candidates(device: Device, problem: GroupedProblem) -> Iterator[Few | Tile | Many]:
    """Configurations that may be the fastest for a problem."""
    rows, scaled = problem.gemm.rows, problem.scaled
    if hopper.serves(device, problem) and rows >= 8:
        for bm in (32, 64, 128, 256):
            if rows // 4 <= bm <= max(64, 2 * rows):
                yield from (Many(bm, turn) for turn in (2, 4))
    if few.serves(device, problem) and rows <= 32:
        for shape in ((2, 1, 4, 2), (2, 1, 4, 3), (2, 2, 4, 2), (4, 1, 4, 2), (4, 1, 2, 2), (4, 1, 2, 3), (2, 2, 2, 3)):
            yield from (Few(tokens, *shape) for tokens in ((8,) if rows <= 2 else (8, 16) if rows <= 16 else (16,)))
    if rows > 128 and hopper.serves(device, problem):
        return
    for bn, bm, warps, stages in (
        (64, 16, 4, 4), (64, 32, 4, 4), (128, 32, 8, 4), (128, 64, 8, 3), (128, 128, 8, 3),
    ):  # fmt: skip
        if min(32, rows // 4) <= bm <= max(16, 2 * rows):
            yield Tile(bn, bm, warps, stages, scaled=scaled)
