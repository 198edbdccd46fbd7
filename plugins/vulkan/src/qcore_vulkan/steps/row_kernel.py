"""`RowGemv`: the product of a single row in one step, as whole models decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from .. import native
from ..builder import Builder, Ref, fold
from ..description import Description
from ..device import Device
from ..layout import Geometry, Part
from .experts import Added, first_column, is_biased
from .gpu_kernels import Single, bindings
from .problem import Activations, GemmProblem
from .rows import NUMBERS, Int8Rows, Rows, local

PROLOGUES = {"": 0, "rms_norm": 1, "silu_mul": 2, "gelu_mul": 3, "gelu_tanh_mul": 4}
"""What a product of one row makes of x and another row before it multiplies, and its number in the shader."""


@dataclass(frozen=True)
class Heads:
    """Where the heads of a result go.

    **Fields:** ``size``: columns of a head; ``rotation``: cosines and sines ``(size,)`` by which heads are rotated as
    `rope` does it; ``out``: memory of the result, if it is not new; ``row``: int32, the row of ``out`` that is written,
    ``stride`` elements from the one before; ``pitch``: elements from head to head; ``offset`` of the first.
    """

    size: int
    rotation: tuple[Ref, Ref] | None = None
    out: Ref | None = None
    row: Ref | None = None
    stride: int = 0
    pitch: int = 0
    offset: int = 0

    def push(self) -> list[int | float]:
        """Push constants of the shader."""
        return [self.size, self.pitch or self.size, self.stride, self.offset]


@dataclass(frozen=True)
class Around:
    """What a product of one row computes beside the product, all of it in float32.

    **Fields:** ``prologue``: one of `PROLOGUES`; ``other``: ``(K,)``: the weight of a norm, if it has one, or what the
    function of x is multiplied by; ``eps`` of a norm; ``residual``: ``(N,)``, added to the result; ``heads``: where
    that goes.
    """

    prologue: str = ""
    other: Ref | None = None
    eps: float = 0.0
    residual: Ref | None = None
    heads: Heads | None = None


_NOTHING = Around()
_MOST_KEPT = 8
"""Fours of columns that a lane keeps in registers."""
_LAST_BINDING = 10
"""Of the variants with `Heads`."""


@dataclass(frozen=True)
class RowGemv(Single):
    """`gemv_row`: a row of float32 against ``8 r`` rows of the weight for each workgroup.

    **Fields:** ``codes``: whether x is quantized symmetrically to int8; ``unroll``: blocks in flight; ``form``: float32
    if x is prepared first, for weights of a table; ``prologue``: one of `PROLOGUES`; ``rotated``: columns of the heads
    that are rotated, if they are; of the variant with `Heads`.
    """

    variant: str
    codes: bool
    lanes: int
    r: int
    unroll: int
    subgroup: int
    form: Literal["rows", "float32"] = "rows"
    prologue: str = ""
    rotated: int | None = None

    def constants(self, geometry: Geometry) -> tuple[int, ...]:
        g = geometry
        sixteens = g.columns // 16 if self.codes else 1
        form = (self.unroll, self.subgroup, int(self.codes), sixteens, g.values)
        around = (PROLOGUES[self.prologue], self._made(g) // 4, int(g.halved))
        rotated = () if self.rotated is None else (self.rotated,)
        return self.lanes, self.r, g.bits, g.zero_kind, *form, *around, *rotated

    def _made(self, geometry: Geometry) -> int:
        """Floats of x in shared memory."""
        return geometry.columns if self.prologue and not self.codes else 4

    def needs(self, geometry: Geometry) -> tuple[int, int]:
        """Lanes of a workgroup and bytes of shared memory."""
        subgroups = self.lanes // self.subgroup
        own = (geometry.columns if self.codes else 16) + 4 * (geometry.values + 1 + self._made(geometry))
        return self.lanes, subgroups * (self.r * 32 + 8) + own

    def append(
        self,
        b: Builder,
        x: Activations,
        part: Part,
        geometry: Geometry,
        bias: Added,
        out: Rows,
        around: Around = _NOTHING,
    ) -> None:
        assert not isinstance(x, Int8Rows)
        x = local(b, x) if isinstance(x, Rows) else x  # every workgroup reads it
        push = [part.n, part.padded_n, geometry.row_blocks, 2.0 / geometry.steps]
        push += [out.pitch, NUMBERS[out.dtype], int(is_biased(bias)), first_column(bias, part)]
        push += [int(around.residual is not None), int(around.other is not None), around.eps]
        refs = bindings(x.ref, part, part.table or around.residual, bias, out, around.other)
        if (heads := around.heads) is not None:
            push += heads.push()
            refs += [*(heads.rotation or (x.ref, x.ref)), heads.row or x.ref]
        groups = fold(-(-part.padded_n // (8 * self.r)))
        b.dispatch(self.variant, self.constants(geometry), groups, push, refs, subgroup=self.subgroup)

    def around(
        self, device: Device, geometry: Geometry, prologue: str, residual: bool, rotated: int | None
    ) -> RowGemv | None:
        """The kernel that computes what is around the product as well; None if there is none on this device.

        ``rotated``: None without `Heads`, 0 if they are not rotated, else their columns.
        """
        if geometry.columns != geometry.k or (residual and geometry.is_table):
            return None
        found, limits = replace(self, prologue=prologue), device.description.limits
        if prologue and geometry.columns > 4 * _MOST_KEPT * self.lanes:
            return None
        if rotated is not None:
            if geometry.n % max(rotated, 1) or rotated % 16 or limits.storage_buffers <= _LAST_BINDING:
                return None
            placed = self.variant.replace("gemv_row", "gemv_row_placed")
            found = replace(found, variant=placed, rotated=rotated, r=max(self.r, 2) if rotated else self.r)
        if found.needs(geometry)[1] > limits.shared_memory:
            return None
        try:
            device.pipeline(found.variant, found.constants(geometry), found.subgroup)
        except native.Unsupported:
            return None
        return found


def row_kernels(description: Description, problem: GemmProblem, cores: int) -> Iterator[RowGemv]:
    """Kernels for a row of float32 without padding, which is not quantized or by each row's own symmetric scale.

    Of a table, for any row: it is made one of float32, with padding.
    """
    g, subgroup = problem.geometry, description.subgroup.size
    codes = problem.op == "gemm_int"
    as_it_is = problem.x_dtype == torch.float32 and g.columns == g.k
    if problem.m != 1 or not (as_it_is or g.is_table) or (codes and not problem.symmetric):
        return
    variant = "gemv_row_dot" if description.features.get("integer_dot") else "gemv_row_plain"
    blocks = g.row_blocks
    most = 4 if g.bits == 4 else 2
    r = next((r for r in (4, 2) if r <= most and -(-g.n // (8 * r)) * 8 >= 7 * cores), 1)
    lanes = 512
    while lanes > min(description.limits.max_invocations, max(subgroup, blocks * 8)):
        lanes //= 2
    for count in (lanes, lanes // 2):
        if count >= subgroup:
            yield RowGemv(
                variant, codes, count, r, 2 if blocks * 8 > count else 1, subgroup, "float32" if g.is_table else "rows"
            )
