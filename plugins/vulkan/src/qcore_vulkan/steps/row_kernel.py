"""`RowGemv`: the product of a single row in one step, as whole models decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from ..builder import Builder, fold
from ..description import Description
from ..layout import Geometry, Part
from .experts import Added, first_column, is_biased
from .gpu_kernels import Single, bindings
from .problem import Activations, GemmProblem
from .rows import NUMBERS, Int8Rows, Rows, local


@dataclass(frozen=True)
class RowGemv(Single):
    """`gemv_row`: a row of float32 against ``8 r`` rows of the weight for each workgroup.

    **Fields:** ``codes``: whether x is quantized symmetrically to int8; ``unroll``: blocks in flight; ``form``: float32
    if x is prepared first, for weights of a table.
    """

    variant: str
    codes: bool
    lanes: int
    r: int
    unroll: int
    subgroup: int
    form: Literal["rows", "float32"] = "rows"

    def constants(self, geometry: Geometry) -> tuple[int, ...]:
        g = geometry
        sixteens = g.columns // 16 if self.codes else 1
        form = (self.unroll, self.subgroup, int(self.codes), sixteens, g.values)
        return self.lanes, self.r, g.bits, g.zero_kind, *form

    def needs(self, geometry: Geometry) -> tuple[int, int]:
        """Lanes of a workgroup and bytes of shared memory."""
        subgroups = self.lanes // self.subgroup
        own = (geometry.columns if self.codes else 16) + 4 * (geometry.values + 1)
        return self.lanes, subgroups * (self.r * 32 + 4) + own

    def append(self, b: Builder, x: Activations, part: Part, geometry: Geometry, bias: Added, out: Rows) -> None:
        assert not isinstance(x, Int8Rows)
        x = local(b, x) if isinstance(x, Rows) else x  # every workgroup reads it
        blocks = geometry.groups * geometry.blocks
        push = [part.n, part.padded_n, blocks, 1.0 / geometry.blocks]
        push += [out.pitch, NUMBERS[out.dtype], int(is_biased(bias)), first_column(bias, part)]
        refs = bindings(x.ref, part, part.table, bias, out, None)
        groups = fold(-(-part.padded_n // (8 * self.r)))
        b.dispatch(self.variant, self.constants(geometry), groups, push, refs, subgroup=self.subgroup)


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
    blocks = g.groups * g.blocks
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
