"""Kernels for GPUs: the steps that each appends. `selection` chooses among them."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

import torch

from ..builder import Builder, Ref, fold
from ..device import Buffer
from ..layout import FLOAT_ZERO, INT_ZERO, STEP, Geometry, Halves, Part
from .experts import Added, columns, first_column, is_biased, memory, row_tiles, words
from .problem import Activations
from .rows import NUMBERS, FloatRows, Int8Rows, Rows

Pipeline = tuple[str, tuple[int, ...], int]
"""A variant, its constants and the size of its subgroups."""

_SPLIT_LANES = 64
TERMS = 2
"""Float16 numbers that hold 22 bits of a float32, for cooperative matrices: as much as sums in float32 are worth."""


class Single:
    """A kernel whose helpers, if it has any, are compiled by every device that compiles the kernel."""

    def helpers(self, geometry: Geometry) -> list[Pipeline]:
        """Pipelines that it needs in addition to its own."""
        del geometry
        return []


@dataclass(frozen=True)
class Digits:
    """`gemv_digits`: ``rows`` rows of x at a time against ``8 r`` rows of the weight for each workgroup.

    **Fields:** ``digits``: 1 for int8 activations, 3 for 16-bit floats, 4 for float32; ``chunk``: blocks that a lane
    processes at a time, if a group has a multiple of them; ``unroll``: chunks in flight; ``experts``: whether rows are
    sorted by expert.
    """

    variant: str
    digits: int
    lanes: int
    r: int
    rows: int
    unroll: int
    chunk: int
    subgroup: int
    experts: bool = False

    @property
    def form(self) -> Literal["int8", "rows"]:
        return "int8" if self.digits == 1 else "rows"

    def constants(self, geometry: Geometry) -> tuple[int, ...]:
        g = geometry
        return (
            self.lanes,
            self.r,
            self.rows,
            g.bits,
            self.digits,
            g.zero_kind,
            self.unroll,
            self.subgroup,
            self.blocks(g),
            int(self.experts),
            int(g.halved),
        )

    def blocks(self, geometry: Geometry) -> int:
        """Blocks of a chunk of this weight. Lanes that split x exchange data by shuffles, eight per block."""
        most = self.chunk if self.digits == 1 else min(self.chunk, self.subgroup // 8)
        return next((c for c in (4, 2) if c <= most and geometry.steps % (2 * c) == 0), 1)

    def _steps(self, geometry: Geometry) -> int:
        """Steps of 16 columns whose digits have a power of two in common."""
        return 1 if geometry.halved else 2 * self.blocks(geometry)

    def append(self, b: Builder, x: Activations, part: Part, geometry: Geometry, bias: Added, out: Rows) -> None:
        asymmetric = isinstance(x, Int8Rows) and x.asymmetric
        extra: Ref | None
        if isinstance(x, Int8Rows):
            codes, params = x.codes, x.params
            extra = _row_sums(b, part, geometry, folded=False) if asymmetric else None
        else:
            codes, params, extra = self._split(b, x, geometry)
        n = columns(bias, part, geometry)
        push = [out.rows, n, part.padded_n, geometry.row_blocks, 2.0 / geometry.steps, *_result(out, bias, part)]
        push += [int(asymmetric), out.rows, *words(bias, part, geometry)]
        x_tiles, folds, _ = fold(-(-n // (8 * self.r)))
        groups = (x_tiles, folds, row_tiles(out.rows, self.rows, bias))
        refs = bindings(codes, part, params, bias, out, extra)
        b.dispatch(self.variant, self.constants(geometry), groups, push, refs, subgroup=self.subgroup)

    def helpers(self, geometry: Geometry) -> list[Pipeline]:
        """Pipelines that it needs in addition to its own."""
        return [] if self.digits == 1 else [("gemv_split", (self.digits, self._steps(geometry)), self.subgroup)]

    def _split(self, b: Builder, x: Activations, geometry: Geometry) -> tuple[Ref, Ref, Ref]:
        """Digits of float rows; scale and sums of each chunk; the remainder that digits do not hold."""
        ref, sizes, dtype = _source(x, geometry)
        rows, blocks, steps = int(sizes[0]), geometry.row_blocks, self._steps(geometry)
        ((variant, constants, subgroup),) = self.helpers(geometry)
        groups, push = fold(-(-rows * blocks * 8 // _SPLIT_LANES)), [*sizes, blocks, dtype]

        def make() -> tuple[Ref, Ref, Ref]:
            codes, sums = b.scratch(rows * blocks * self.digits * 32), b.scratch(rows * blocks * 2 // steps * 16)
            rest = b.scratch(rows * blocks * 128)
            b.dispatch(variant, constants, groups, push, [ref, codes, sums, rest], subgroup=subgroup)
            return codes, sums, rest

        return b.prepared(ref, (variant, constants, *push), make)

    def needs(self, geometry: Geometry) -> tuple[int, int]:
        """Lanes of a workgroup and bytes of shared memory."""
        del geometry
        return self.lanes, self.lanes // self.subgroup * self.r * self.rows * 32


@dataclass(frozen=True)
class CoopGemv(Single):
    """`gemv_coop`: ``tn`` rows of x against ``16 r`` rows of the weight, ``chunk`` blocks of 32 columns at a time."""

    lanes: int
    r: int
    chunk: int
    tn: int
    variant: str = "gemv_coop"
    form: Literal["rows"] = "rows"
    subgroup: int = 32

    def constants(self, geometry: Geometry) -> tuple[int, ...]:
        g = geometry
        fold_ = 0 if g.groups == 1 else gcd(2 * self.chunk, g.steps)
        return self.lanes, self.r, self.chunk, fold_, g.bits, g.zero_kind, self.tn

    def needs(self, geometry: Geometry) -> tuple[int, int]:
        """Lanes of a workgroup and bytes of shared memory."""
        del geometry
        return self.lanes, self.lanes // 32 * 16 * (self.chunk * 64 + 16)

    def append(self, b: Builder, x: Activations, part: Part, geometry: Geometry, bias: Added, out: Rows) -> None:
        padded = -(-geometry.columns // (32 * self.chunk)) * 32 * self.chunk
        rows = -(-out.rows // self.tn) * self.tn
        halves = _halves(b, x, geometry, padded, rows, tile=self.tn)
        push = [*_sizes(part, geometry, out, part.n), *_result(out, bias, part)]
        tiles, folds, _ = fold(-(-part.n // (16 * self.r)))
        refs = bindings(halves.codes, part, halves.scales, bias, out, None)
        groups = (tiles, folds, rows // self.tn)
        b.dispatch(self.variant, self.constants(geometry), groups, push, refs, subgroup=self.subgroup)


@dataclass(frozen=True)
class TileShape:
    """A tile of a GEMM.

    **Fields:** ``bm`` by ``bn`` results of a workgroup, ``m`` by ``n`` of a lane or, if matrices are cooperative, of
    a subgroup; ``kb``: blocks of 32 columns at a time, at most.
    """

    bm: int
    bn: int
    m: int
    n: int
    kb: int = 1

    @property
    def owners(self) -> int:
        """Lanes, or subgroups, of a workgroup: each owns m by n results."""
        return (self.bm // self.m) * (self.bn // self.n)

    def blocks(self, geometry: Geometry) -> int:
        """Blocks at a time: a number that divides those of a group, or of a row if groups share blocks."""
        whole = geometry.row_blocks if geometry.halved else geometry.steps // 2
        return next(c for c in (4, 2, 1) if c <= self.kb and whole % c == 0)

    def tile_bytes(self, geometry: Geometry, width: int, terms: int = 1) -> int:
        """Bytes of both tiles, of ``terms`` of x, of elements of ``width`` bytes, each row padded by 16."""
        return (terms * self.bm + self.bn) * (self.blocks(geometry) * 32 * width + 16)

    def groups(self, rows: int, columns: int, added: Added = None) -> tuple[int, int, int]:
        """Workgroups for a result."""
        return row_tiles(rows, self.bm, added), -(-columns // self.bn), 1


@dataclass(frozen=True)
class SharedFloat(Single):
    """`gemm_float_shared`."""

    shape: TileShape
    variant: str = "gemm_float_shared"
    form: Literal["float32"] = "float32"
    subgroup: int = 0
    experts: bool = False

    def constants(self, geometry: Geometry) -> tuple[int, ...]:
        s = self.shape
        form = (geometry.bits, geometry.zero_kind, 1, int(self.experts), geometry.values)
        return s.owners, s.bm, s.bn, s.m, s.n, *form

    def needs(self, geometry: Geometry) -> tuple[int, int]:
        """Lanes of a workgroup and bytes of shared memory."""
        return self.shape.owners, 2 * 16 * 4 * (self.shape.bm + self.shape.bn + 8) + 4 * (geometry.values + 1)

    def append(self, b: Builder, x: Activations, part: Part, geometry: Geometry, bias: Added, out: Rows) -> None:
        assert isinstance(x, FloatRows)
        n = columns(bias, part, geometry)
        push = [*_sizes(part, geometry, out, n), *_result(out, bias, part), x.stride // 4]
        push += words(bias, part, geometry)
        refs = bindings(x.ref, part, part.table, bias, out, None)
        b.dispatch(self.variant, self.constants(geometry), self.shape.groups(out.rows, n, bias), push, refs)


@dataclass(frozen=True)
class SharedInt(Single):
    """`gemm_int_shared`."""

    variant: str
    shape: TileShape
    form: Literal["int8"] = "int8"
    subgroup: int = 0
    experts: bool = False

    def constants(self, geometry: Geometry) -> tuple[int, ...]:
        s, g = self.shape, geometry
        form = (g.bits, g.zero_kind, int(g.groups > 1), int(self.experts), int(g.halved))
        return s.owners, s.bm, s.bn, s.blocks(g), s.m, s.n, *form

    def needs(self, geometry: Geometry) -> tuple[int, int]:
        """Lanes of a workgroup and bytes of shared memory."""
        return self.shape.owners, 2 * self.shape.tile_bytes(geometry, 1)

    def append(self, b: Builder, x: Activations, part: Part, geometry: Geometry, bias: Added, out: Rows) -> None:
        refs, tokens = _int8(b, x, part, geometry, bias, out)
        n = columns(bias, part, geometry)
        push = [*_sizes(part, geometry, out, n), *_result(out, bias, part), geometry.groups, *tokens]
        push += words(bias, part, geometry)
        b.dispatch(self.variant, self.constants(geometry), self.shape.groups(out.rows, n, bias), push, refs)


@dataclass(frozen=True)
class CoopInt8(Single):
    """`coop_int8`; ``tile``: m, n, k of a cooperative matrix, ``subgroup`` its lanes; ``splits`` of K, at most."""

    shape: TileShape
    tile: tuple[int, int, int]
    subgroup: int
    splits: int = 1
    variant: str = "coop_int8"
    form: Literal["int8"] = "int8"

    def constants(self, geometry: Geometry) -> tuple[int, ...]:
        return *_coop_constants(self.shape, self.tile, self.subgroup, geometry), int(geometry.halved)

    def needs(self, geometry: Geometry) -> tuple[int, int]:
        """Lanes of a workgroup and bytes of shared memory."""
        lanes, shared = _coop_needs(self, geometry, 1)
        zeros = self.tile[2] > STEP and geometry.halved  # beside each step of the weight's tile
        return lanes, shared + (self.shape.bn * self.shape.blocks(geometry) * 32 if zeros else 0)

    def append(self, b: Builder, x: Activations, part: Part, geometry: Geometry, bias: Added, out: Rows) -> None:
        refs, tokens = _int8(b, x, part, geometry, bias, out)
        _append_coop(self, b, part, geometry, bias, out, refs, tokens, _whole_groups(self, geometry))


@dataclass(frozen=True)
class CoopF16(Single):
    """`coop_f16`: integers, or codes of a table in `Geometry.halves`, of eight bits in one term.

    **Fields:** as of `CoopInt8`, and ``terms``: `TERMS` if x is float32.
    """

    shape: TileShape
    tile: tuple[int, int, int]
    subgroup: int
    splits: int = 1
    terms: int = 1
    variant: str = "coop_f16"
    form: Literal["rows"] = "rows"

    def constants(self, geometry: Geometry) -> tuple[int, ...]:
        g = geometry
        form = (self.terms, g.values, *_halves_of(g), int(g.halved))
        return *_coop_constants(self.shape, self.tile, self.subgroup, g), *form

    def needs(self, geometry: Geometry) -> tuple[int, int]:
        """Lanes of a workgroup and bytes of shared memory."""
        lanes, shared = _coop_needs(self, geometry, 2, self.terms)
        more = (_halves_of(geometry).terms - 1) * self.shape.bn * (self.shape.blocks(geometry) * 64 + 16)
        return lanes, shared + more + _table_bytes(geometry)

    def append(self, b: Builder, x: Activations, part: Part, geometry: Geometry, bias: Added, out: Rows) -> None:
        halves = _halves(b, x, geometry, geometry.columns, out.rows, terms=self.terms)
        refs = [*bindings(halves.codes, part, halves.scales, bias, out, halves.sums), part.table or halves.codes]
        _append_coop(self, b, part, geometry, bias, out, refs, [], _whole_groups(self, geometry))


@dataclass(frozen=True)
class CoopFragments(Single):
    """`coop_fragments`: int4, or a table of four bits, on devices with `fragments.LAYOUT`; ``splits`` of K, at most.

    **Fields:** ``shape.kb``: blocks in a step, whatever their number; ``terms``: `TERMS` if x is float32.
    """

    shape: TileShape
    splits: int = 1
    terms: int = 1
    variant: str = "coop_fragments"
    form: Literal["rows"] = "rows"
    subgroup: int = 32

    def constants(self, geometry: Geometry) -> tuple[int, ...]:
        s, g = self.shape, geometry
        group = max(1, g.steps // 2) if g.groups > 1 else 0
        sizes = (s.owners * 32, s.bm, s.bn, s.kb, s.m, s.n)
        form = (self.terms, g.values, *_halves_of(g), int(g.halved))
        return *sizes, g.zero_kind, group, gcd(s.kb, group), *form

    def needs(self, geometry: Geometry) -> tuple[int, int]:
        """Lanes of a workgroup and bytes of shared memory."""
        s = self.shape
        return s.owners * 32, 2 * self.terms * s.bm * (s.kb * 64 + 16) + _table_bytes(geometry) + 4

    def append(self, b: Builder, x: Activations, part: Part, geometry: Geometry, bias: Added, out: Rows) -> None:
        halves = _halves(b, x, geometry, geometry.columns, out.rows, terms=self.terms, quads=True)
        refs = bindings(halves.codes, part, halves.scales, bias, out, halves.sums)
        refs.append(part.table or halves.codes)
        blocks, step = geometry.row_blocks, self.shape.kb
        split = -(-blocks // (self.splits * step)) * step
        _append_coop(self, b, part, geometry, bias, out, refs, [], (split, -(-blocks // split)))


Kernel = Digits | CoopGemv | SharedFloat | SharedInt | CoopInt8 | CoopF16 | CoopFragments
OF_EXPERTS = (Digits, SharedFloat, SharedInt)
"""Kernels that serve rows sorted by expert."""


@dataclass(frozen=True)
class _Halves:
    """The output of `coop_prep`: float16 rows, a scale for each with room for plain rows, sums of each row's groups."""

    codes: Ref
    scales: Ref
    sums: Ref | None


def _int8(
    b: Builder, x: Activations, part: Part, geometry: Geometry, bias: Added, out: Rows
) -> tuple[list[Ref | Buffer | None], list[int | float]]:
    """Bindings of a GEMM of int8 activations; whether they have zero points, and the offsets of those and of sums."""
    assert isinstance(x, Int8Rows)
    sums = _row_sums(b, part, geometry, folded=True) if x.asymmetric else None
    return bindings(x.codes, part, x.params, bias, out, sums), [int(x.asymmetric), x.rows, 2 * x.rows]


def _whole_groups(kernel: CoopInt8 | CoopF16, geometry: Geometry) -> tuple[int, int]:
    """The steps of a part of K, which is of whole groups, and the number of parts."""
    g, kb = geometry, kernel.shape.blocks(geometry)
    whole = 1 if g.groups == 1 or g.halved else g.steps // (2 * kb)
    steps = g.row_blocks // kb
    split = -(-steps // (kernel.splits * whole)) * whole
    return split, -(-steps // split)


def _append_coop(
    kernel: CoopInt8 | CoopF16 | CoopFragments,
    b: Builder,
    part: Part,
    geometry: Geometry,
    bias: Added,
    out: Rows,
    refs: list[Ref | Buffer | None],
    push: list[int | float],
    parts: tuple[int, int],
) -> None:
    """The product in ``parts`` of K: the steps of each part and their number; of several, the sum as well."""
    split, count = parts
    x_tiles, y_tiles, _ = kernel.shape.groups(out.rows, part.n)
    result = _result(out, bias, part)
    if count > 1:
        refs[6] = b.scratch(4 * count * out.rows * part.n)
        result = [part.n, NUMBERS[torch.float32], 0, 0]
    push = [*_sizes(part, geometry, out, part.n), *result, geometry.groups, split, *push]
    groups = (x_tiles, y_tiles, count)
    b.dispatch(kernel.variant, kernel.constants(geometry), groups, push, refs, subgroup=kernel.subgroup)
    if count > 1:
        total = out.rows * part.n
        joined: list[Ref | Buffer | None] = [refs[6], None, None, None, None, memory(bias, part), out.ref]
        b.dispatch("gemm_join", (), fold(-(-total // 64)), [out.rows, part.n, count, *_result(out, bias, part)], joined)


def _halves_of(geometry: Geometry) -> Halves:
    return geometry.halves or Halves(1, 0)


def _table_bytes(geometry: Geometry) -> int:
    """Shared memory of coop_tables.glsl."""
    return 1024 * _halves_of(geometry).terms if geometry.is_table else 4


def _coop_needs(kernel: CoopInt8 | CoopF16, geometry: Geometry, width: int, terms: int = 1) -> tuple[int, int]:
    """Tiles, whose memory later holds the results of all subgroups, and scales of two groups, as of `coop_f16`."""
    s = kernel.shape
    tiles = s.tile_bytes(geometry, width, terms)
    first = tiles * terms * s.bm // (terms * s.bm + s.bn)
    results = 4 * s.owners * kernel.tile[0] * kernel.tile[1]
    groups = 2 * s.blocks(geometry) if geometry.halved else 1
    return s.owners * kernel.subgroup, tiles + max(0, results - first) + 8 * groups * (s.bn + 4) + 4


def _coop_constants(shape: TileShape, tile: tuple[int, int, int], subgroup: int, g: Geometry) -> tuple[int, ...]:
    s = shape
    sizes = (s.owners * subgroup, s.bm, s.bn, s.blocks(g), s.m, s.n)
    return *sizes, g.bits, g.zero_kind, int(g.groups > 1), *tile, 1


def _sizes(part: Part, geometry: Geometry, out: Rows, n: int) -> list[int | float]:
    return [out.rows, n, part.padded_n, geometry.row_blocks, geometry.steps]


def _result(out: Rows, bias: Added, part: Part) -> list[int | float]:
    return [out.pitch, NUMBERS[out.dtype], int(is_biased(bias)), first_column(bias, part)]


def bindings(
    x: Ref, part: Part, params: Ref | Buffer | None, bias: Added, out: Rows, extra: Ref | None
) -> list[Ref | Buffer | None]:
    """Bindings 0 to 7 of every kernel here; a binding that a kernel does not use gets any buffer."""
    zero = part.scale if part.zero is None else part.zero
    return [x, part.codes, part.scale, zero, params or x, memory(bias, part), out.ref, extra or x]


def _source(x: Activations, geometry: Geometry) -> tuple[Ref, list[int | float], int]:
    """Rows as gpu_rows.glsl reads them: their memory; rows, k, pitch, group and its padded columns; the dtype."""
    if isinstance(x, FloatRows):
        columns = geometry.columns
        return x.ref, [x.rows, columns, x.stride, columns, columns], NUMBERS[x.dtype]
    assert isinstance(x, Rows)
    padded = geometry.steps * STEP
    return x.ref, [x.rows, geometry.k, x.pitch, geometry.group, padded], NUMBERS[x.dtype]


def _halves(
    b: Builder,
    x: Activations,
    geometry: Geometry,
    columns: int,
    rows: int,
    *,
    tile: int = 0,
    terms: int = 1,
    quads: bool = False,
) -> _Halves:
    """Float16 rows in the order of unpacked codes; memory for ``rows`` of each term; those beyond x's are undefined.

    ``tile``: rows of tiles of sixteen columns, each stored contiguously; 0: plain rows. ``terms``: see `CoopF16`.
    ``quads``: in the order of `CoopFragments`.
    """
    ref, sizes, dtype = _source(x, geometry)
    m = int(sizes[0])
    summed = geometry.zero_kind == FLOAT_ZERO
    plain = 0 if dtype == NUMBERS[torch.float16] else 4 * m * columns
    padded = geometry.steps * STEP
    aligned = isinstance(x, FloatRows) or geometry.groups == 1 or geometry.group == padded
    push = [*sizes, columns, int(summed), padded, geometry.groups, tile]
    lanes = min(1024 if columns > 4096 else 256, 1 << b.device.description.limits.max_invocations.bit_length() - 1)
    order = 16 if geometry.is_table and geometry.bits == 4 else geometry.bits
    constants = (order, lanes, dtype, int(aligned), terms, int(quads) * (1 + geometry.halved))

    def make() -> _Halves:
        halves, scales = b.scratch(terms * rows * columns * 2), b.scratch(16 * -(-m // 4) + plain)
        sums = b.scratch(4 * m * geometry.groups) if summed else None
        b.dispatch("coop_prep", constants, fold(m), push, [ref, halves, scales, sums or scales])
        return _Halves(halves, scales, sums)

    return b.prepared(ref, ("coop_prep", constants, rows, *push), make)


def _row_sums(b: Builder, part: Part, geometry: Geometry, *, folded: bool) -> Ref:
    """The change of each column of the result per unit of x's zero point.

    ``folded``: for kernels that subtract int4 zero points from codes and add others times the sum of q - z.
    """
    g = geometry
    integer = g.zero_kind == INT_ZERO and not (folded and g.bits == 8)
    add = g.zero_kind == FLOAT_ZERO and not folded
    result = b.scratch(4 * part.padded_n)
    offset = 8 if g.bits == 4 else 0
    push = [part.padded_n, g.groups, g.group, g.k, offset, int(integer), int(add)]
    zero = part.scale if part.zero is None else part.zero
    b.dispatch("row_sums", (), fold(part.padded_n // 8), push, [part.sums, part.scale, zero, result])
    return result
