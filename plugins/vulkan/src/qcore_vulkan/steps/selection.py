"""Selection of the kernel for a product on a GPU: by the device's features, the rows of x, the sizes of the weight.

One row of float32: `RowGemv`. Other float activations: `Digits` for a row or two (of float32: up to four), `CoopGemv`
for a few rows, `CoopFragments` or `CoopF16` beyond, `SharedFloat` without cooperative matrices. Int8 activations:
`Digits`, then `CoopInt8`, else `SharedInt`. A kernel that the device's compiler refuses is skipped. Sizes were measured
on an H200.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from math import ceil

import torch

from .. import native, tuning_cache
from ..description import Description
from ..device import Device
from ..layout import FLOAT_ZERO, INT_ZERO, STEP
from . import fragments
from .gpu_kernels import (
    OF_EXPERTS,
    TERMS,
    CoopF16,
    CoopFragments,
    CoopGemv,
    CoopInt8,
    Digits,
    Kernel,
    SharedFloat,
    SharedInt,
    TileShape,
)
from .problem import GemmKernel, GemmProblem
from .row_kernel import RowGemv, row_kernels
from .rows import largest_piece

FEW = 8
"""Up to this many rows, kernels are bound by reading the weight, and read it once."""

_COOP_F16 = (TileShape(128, 128, 64, 32, 2), TileShape(64, 64, 32, 32, 2), TileShape(32, 32, 16, 16, 4))
_COOP_F32 = (TileShape(64, 128, 32, 32, 2), TileShape(64, 64, 32, 32, 2), TileShape(32, 32, 16, 16, 2))
_COOP_INT8 = (TileShape(128, 128, 64, 32, 4), TileShape(64, 64, 32, 32, 4), TileShape(32, 32, 16, 16, 4))
_INT = (TileShape(128, 128, 8, 8), TileShape(128, 64, 8, 8, 2), TileShape(64, 64, 4, 8, 2), TileShape(32, 32, 4, 4, 2))
_FLOAT = (TileShape(128, 128, 8, 8), TileShape(128, 64, 8, 8), TileShape(64, 64, 8, 8), TileShape(32, 64, 4, 8))
_FEW_FLOAT32 = 4
"""Rows of float32 up to which digits are faster than matrices: 10.0 us to 13.3 for 4 rows of 1024 x 1024; 8 rows of
14336 x 4096 take 90 to 72."""
_LATENT = 64
"""Rows up to which reading the weight takes the time, and as many workgroups as possible read."""
_PRODUCT, _PARTIAL, _JOIN = 1.2e-6, 4e-6, 5.0
"""Microseconds of a product of two terms in a core, of a partial result in memory, and of the step that adds these."""
_FRAGMENTS = {
    1: (
        (TileShape(32, 128, 16, 32, 4), 5.3),
        (TileShape(32, 256, 32, 32, 4), 7.0),
        (TileShape(64, 256, 64, 32, 4), 9.6),
    ),
    2: (
        (TileShape(32, 128, 16, 32, 4), 7.6),
        (TileShape(32, 256, 32, 32, 4), 10.6),
        (TileShape(64, 256, 64, 32, 2), 20.9),
    ),
}
"""By the terms of x: tiles of `CoopFragments`, and the nanoseconds of a core per tile and column of K."""
_WIDE, _FEW_RESULTS = 1024, 40_000
"""`CoopFragments` is faster from this many rows of the weight, or from this many results; below, the smaller tiles of
`CoopF16` are."""
_CORES = 32
"""Assumed if the driver does not report a number."""

_preferred: dict[tuple[int, GemmProblem], Kernel | RowGemv] = {}


def choose(device: Device, problem: GemmProblem) -> GemmKernel | None:
    """The kernel for a problem on a GPU; None: register tiles compute it."""
    if device.profile != "gpu":
        return None
    preferred = _preferred.get((device.description.index, problem))
    return preferred or tuning_cache.first(device.description, problem, usable(device, problem))


def prefer(device: Device, problem: GemmProblem, kernel: Kernel | RowGemv) -> None:
    """Select this kernel for a problem from now on."""
    _preferred[device.description.index, problem] = kernel


def forget(device: Device, problem: GemmProblem) -> None:
    """Undo `prefer`."""
    _preferred.pop((device.description.index, problem), None)


def usable(device: Device, problem: GemmProblem) -> Iterator[Kernel | RowGemv]:
    """The kernels that support a problem on this device, presumably fastest first."""
    for kernel in candidates(device.description, problem):
        if isinstance(kernel, CoopFragments) and not fragments.has_layout(device):
            continue
        own = (kernel.variant, kernel.constants(problem.geometry), kernel.subgroup)
        try:
            for variant, constants, subgroup in (own, *kernel.helpers(problem.geometry)):
                device.pipeline(variant, constants, subgroup)
        except native.Unsupported:
            continue
        yield kernel


def candidates(description: Description, problem: GemmProblem) -> Iterator[Kernel | RowGemv]:
    """Kernels for a problem by the features that a device reports."""
    kernels = _int(description, problem) if problem.op == "gemm_int" else _float(description, problem)
    if problem.experts:
        own = (replace(kernel, experts=True) for kernel in kernels if isinstance(kernel, OF_EXPERTS))
        return (kernel for kernel in own if fits(kernel, problem, description))
    alone = row_kernels(description, problem, description.limits.cores or _CORES)
    return (kernel for kernel in chain(alone, kernels) if fits(kernel, problem, description))


def fits(kernel: Kernel | RowGemv, problem: GemmProblem, description: Description) -> bool:
    """Whether a workgroup's lanes and shared memory are within the device's limits."""
    lanes, shared = kernel.needs(problem.geometry)
    limits = description.limits
    return lanes <= min(limits.max_invocations, limits.max_group_size[0]) and shared <= limits.shared_memory


def _int(description: Description, problem: GemmProblem) -> Iterator[Kernel]:
    suffix = "dot" if description.features.get("integer_dot") else "plain"
    folds = problem.geometry.bits == 4 or problem.geometry.zero_kind != INT_ZERO  # codes fit a byte then
    tile = _matrix(description, "s8", "s32") if folds else None
    if problem.m <= (2 * FEW if tile is None else FEW):
        yield from _digits(description, problem, f"gemv_digits_{suffix}", 1)
    if tile is not None:
        for shape, splits in _coop_shapes(_COOP_INT8, description, problem):
            # Beside each 16 columns of a group that shares a block lie zeros, which take as much shared memory.
            padded = problem.geometry.halved and tile[2] > STEP
            own = replace(shape, kb=shape.kb // 2) if padded else shape
            yield CoopInt8(own, tile, description.subgroup.size, splits)
    for shape in _by_time(_INT, description, problem):
        yield SharedInt(f"gemm_int_shared_{suffix}", shape)


def _float(description: Description, problem: GemmProblem) -> Iterator[Kernel]:
    narrow = problem.x_dtype != torch.float32
    terms = 1 if narrow or problem.coarse else TERMS
    tile = _matrix(description, "f16", "f32")
    if problem.geometry.is_table:
        if problem.geometry.halves is not None and tile is not None:
            yield from _coop_float(description, problem, tile, terms)
        yield from map(SharedFloat, _by_time(_FLOAT, description, problem))
        return
    if tile is not None and narrow and 2 < problem.m <= 4 * FEW and problem.geometry.zero_kind != FLOAT_ZERO:
        yield from _coop_gemv(description, problem)
    digits: list[Kernel] = []
    if problem.m <= FEW and description.features.get("integer_dot"):
        digits = [*_digits(description, problem, "gemv_digits_dot", 3 if narrow else 4)]
    digits_first = narrow or problem.m <= _FEW_FLOAT32
    if digits_first:
        yield from digits
    if tile is not None:
        yield from _coop_float(description, problem, tile, terms)
    if not digits_first:
        yield from digits
    for shape in _by_time(_FLOAT, description, problem):
        yield SharedFloat(shape)


def _coop_float(
    description: Description, problem: GemmProblem, tile: tuple[int, int, int], terms: int
) -> Iterator[Kernel]:
    g = problem.geometry
    if g.n >= _WIDE or problem.m * g.n > _FEW_RESULTS or g.is_table:
        yield from _fragments(terms, description, problem, tile)
    if g.bits == 8 and g.halves is not None and g.halves.terms > 1:  # `CoopF16` takes one term of eight bits
        return
    by = _coop_shapes if terms == 1 or problem.m <= _LATENT else _coop_by_time
    for shape, splits in by(_COOP_F16 if terms == 1 else _COOP_F32, description, problem):
        yield CoopF16(shape, tile, description.subgroup.size, splits, terms)


def _digits(description: Description, problem: GemmProblem, variant: str, digits: int) -> Iterator[Kernel]:
    subgroup, g = description.subgroup.size, problem.geometry
    cores, blocks = description.limits.cores or _CORES, g.row_blocks
    rows = next(size for size in (1, 2, 4, 8) if size >= min(problem.m, FEW))
    # With int4 a lane holds more rows of the weight, with int8 more blocks: equally many bytes in flight.
    most = 4 if g.bits == 4 or rows == FEW else 2
    r = next((r for r in (4, 2) if r <= most and -(-g.n // (8 * r)) * 8 >= 7 * cores), 1)
    lanes = 1024 if rows == 1 and g.bits == 4 and blocks >= 256 else 512
    while lanes > min(description.limits.max_invocations, max(subgroup, blocks * 8)):
        lanes //= 2
    unroll = 2 if g.bits == 8 and r == 2 and rows <= 4 else 1
    yield Digits(variant, digits, lanes, r, rows, unroll, 1, subgroup)
    if rows > 1:
        yield Digits(variant, digits, lanes, min(r, 2), rows, 1, 4, subgroup)
    for smaller in (lanes // 2, lanes // 4):
        if smaller >= subgroup:
            yield Digits(variant, digits, smaller, r, rows, unroll, 1, subgroup)


def _coop_gemv(description: Description, problem: GemmProblem) -> Iterator[Kernel]:
    s, g = description.subgroup, problem.geometry
    # Scales are read for sixteen rows, so the weight's padding to eight must not end within them.
    whole = -g.n % 16 < 8 and g.n * g.row_bytes <= description.limits.max_storage_range
    if not (whole and s.control and s.min <= 32 <= s.max):
        return
    tn = 8 if problem.m <= 8 and description.has_matrix((16, 8, 16), "f16", "f32") else 16
    if not description.has_matrix((16, tn, 16), "f16", "f32"):
        return
    cores = description.limits.cores or _CORES
    for r in (2, 1) if -(-g.n // 32) * 8 >= 7 * cores else (1, 2):
        for lanes, chunk in ((512, 2), (256, 4)):
            yield CoopGemv(lanes, r, chunk, tn)


def _coop_shapes(
    shapes: tuple[TileShape, ...], description: Description, problem: GemmProblem
) -> Iterator[tuple[TileShape, int]]:
    """Shapes, the smallest that holds all rows first (else the largest), and splits of K to fill the cores."""
    cores, m, n = description.limits.cores or _CORES, problem.m, problem.geometry.n
    for shape in sorted(shapes, key=lambda shape: (shape.bm < m, abs(shape.bm - m))):
        x, y, _ = shape.groups(m, n)
        room = cores * (128 // shape.bm) // (x * y)  # a core runs several small tiles at once
        yield shape, next(splits for splits in reversed(_splits(description, problem)) if splits <= max(room, 1))


def _splits(description: Description, problem: GemmProblem) -> list[int]:
    """Splits of K whose partial results fit into scratch memory."""
    most = largest_piece(description.limits)
    return [splits for splits in (1, 2, 4, 8) if splits == 1 or 4 * splits * problem.m * problem.geometry.n <= most]


def _coop_by_time(
    shapes: tuple[TileShape, ...], description: Description, problem: GemmProblem
) -> Iterator[tuple[TileShape, int]]:
    """Shapes with splits of K, in ascending order of the time that they should take."""
    cores, m, g = description.limits.cores or _CORES, problem.m, problem.geometry

    def time(one: tuple[TileShape, int]) -> float:
        shape, splits = one
        x, y, _ = shape.groups(m, g.n)
        columns = g.columns / splits + 256  # the first tiles and the results overlap with nothing
        tiles = -(-x * y * splits // cores) * shape.bm * shape.bn * columns * (1 + 32 / shape.bm + 32 / shape.bn)
        return tiles * _PRODUCT + (0.0 if splits == 1 else _JOIN + splits * m * g.n * _PARTIAL)

    found = sorted(((shape, splits) for shape in shapes for splits in _splits(description, problem)), key=time)
    yield from _first_of_each(found)


def _first_of_each(found: Iterable[tuple[TileShape, int]]) -> Iterable[tuple[TileShape, int]]:
    """Each shape once, with the splits at which it comes first."""
    first: dict[TileShape, int] = {}
    for shape, splits in found:
        first.setdefault(shape, splits)
    return first.items()


def _fragments(
    terms: int, description: Description, problem: GemmProblem, tile: tuple[int, int, int] | None
) -> Iterator[Kernel]:
    """`CoopFragments` with splits of K, in ascending order of the time that they should take."""
    cores, m, g = description.limits.cores or _CORES, problem.m, problem.geometry
    if tile != (16, 16, 16) or g.bits != 4:
        return
    more = 1.0 if g.halves is None else (g.halves.terms + terms - 1) / terms  # matrix products over those of integers

    def time(one: tuple[TileShape, float, int]) -> float:
        shape, pace, splits = one
        x, y, _ = shape.groups(m, g.n)
        tiles = x * y * splits / cores
        rounds: float = ceil(tiles)
        if shape.bn == 128:  # a core runs two of the smallest at once
            rounds = 2 * ceil(tiles / 2) if tiles > 1 else 1.3
        columns = g.columns / splits + 65  # the first step and the results overlap with nothing
        return 1e-3 * rounds * pace * more * columns + (0.0 if splits == 1 else _JOIN + splits * m * g.n * _PARTIAL)

    parts = [splits for splits in _splits(description, problem) if splits == 1 or g.columns >= 512 * splits]
    found = sorted(((*one, splits) for one in _FRAGMENTS[terms] for splits in parts), key=time)
    for shape, splits in _first_of_each((shape, splits) for shape, _, splits in found):
        yield CoopFragments(shape, splits, terms)


def _by_time(shapes: tuple[TileShape, ...], description: Description, problem: GemmProblem) -> list[TileShape]:
    """Shapes in ascending order of the time that the cores spend on all of their tiles."""
    cores, m, n = description.limits.cores or _CORES, problem.m, problem.geometry.n

    def time(shape: TileShape) -> float:
        x, y, _ = shape.groups(m, n)
        return -(-x * y // cores) * shape.bm * shape.bn * (1 + 8 / shape.bm + 8 / shape.bn)

    return sorted(shapes, key=time)


def _matrix(description: Description, operand: str, result: str) -> tuple[int, int, int] | None:
    """The shape of cooperative matrices of these element types, the first that the kernels support."""
    wanted = [(16, 16, 16), (16, 8, 16)] if operand == "f16" else [(16, 16, 32), (16, 16, 16), (16, 8, 32)]
    return next((shape for shape in wanted if description.has_matrix(shape, operand, result)), None)
