"""`GemmProblem`: everything that the choice of a kernel depends on, made once for each form of a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from qcore_triton.weights import FLOAT_ZERO, INTEGER, LONG_GROUP, NO_ZERO, TABLE, Weight, pitch_of

FLOAT, INT8 = "float", "int8"
"""The two kinds of activations, with separate kernels and tables."""

TERMS = 3
"""The number of bfloat16 matrices that float32 activations are the sum of."""

_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def bucket(m: int) -> int:
    """M rounded up to the next power of two, at most 2048: the row counts that choices are made for."""
    return next((b for b in _BUCKETS if m <= b), _BUCKETS[-1])


class Form(NamedTuple):
    """A packed weight without its values.

    **Fields:** ``packed``: the shape of its data; ``groups``; ``zero``: a dtype or None; ``scale``: its dtype; the
    others as in `Weight`; ``factor``, ``units``: whether there are any.
    """

    packed: tuple[int, ...]
    groups: int
    zero: torch.dtype | None
    n: int
    k: int
    bits: int
    group: int
    element: str = INTEGER
    scale: torch.dtype = torch.float32
    factor: bool = False
    units: bool = False

    def weight(self) -> Weight:
        """A weight of this form, without memory."""
        data = torch.empty(self.packed, dtype=torch.uint8 if self.bits == 4 else torch.int8, device="meta")
        parameters = (self.groups, pitch_of(self.n))
        scale = torch.empty(parameters, dtype=self.scale, device="meta")
        zero = None if self.zero is None else torch.empty(parameters, dtype=self.zero, device="meta")
        factor = torch.empty(1, device="meta") if self.factor else None
        units = torch.empty(pitch_of(self.n), device="meta") if self.units else None
        return Weight(data, scale, zero, self.n, self.k, self.bits, self.group, self.element, factor, units)


def form_of(weight: Weight) -> Form:
    """The form of a packed weight."""
    data, scale, zero, n, k, bits, group, element, factor, units = weight
    kind = None if zero is None else zero.dtype
    has = factor is not None, units is not None
    return Form(data.shape, scale.shape[0], kind, n, k, bits, group, element, scale.dtype, *has)


@dataclass(frozen=True)
class GemmProblem:
    """A product ``x @ W^T``, as described to the kernels.

    **Fields:** ``bits``, ``n``, ``k``: of the weight; ``rows``: `bucket` of M; ``block``: columns of a block of the
    packed weight; ``one_group``: one scale for all of K; ``group``: columns that share a scale; ``zero``: the weight's
    kind of zero point (`NO_ZERO`, `INT_ZERO` or `FLOAT_ZERO`); ``x_dtype``: of float activations; ``out_dtype``: of the
    result; ``split_rows``: of float32 activations, `bucket` of 3 M, the rows of their `TERMS`, else 0; ``element`` and
    ``scale``: see `Weight`; ``half``: products of codes and scales are normal float16 numbers, as x and the result are.

    Of int8 activations (``codes``): ``step``: columns per step along K; ``grouped``: sums of some steps are scaled;
    ``per``: steps whose sums are added in int32; ``x_zero``: activations have a zero point; ``out_by_token``: int8
    results are scaled by parameters of each token; ``own_order``: codes have come in the weight's own order of columns;
    ``units``: the weight has some, see `packing.units_of`.

    Derived: ``activations``: `FLOAT` or `INT8`; ``narrow``: x is of 16-bit floats; ``exact``: a weight must not be
    rounded to x's dtype (float16, whose small numbers are coarse, a result wider than x, or float zero points of long
    groups, see `LONG_GROUP`); ``whole``: scales may come after the sum over all of K (one group), as x and the result
    have 16 bits; ``sums``: with them come float zero points, times sums of x; ``halves``: a block has two groups;
    ``lossless``: the products of codes and scales are exact in 16-bit floats; ``rounded``: so are not even the numbers
    that codes stand for; ``alike``: see `Weight.rounds_alike`.
    """

    bits: int
    n: int
    k: int
    rows: int
    block: int = 128
    one_group: bool = False
    group: int = 0
    zero: int = NO_ZERO
    x_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    split_rows: int = 0
    codes: bool = False
    step: int = 128
    grouped: bool = False
    per: int = 1
    x_zero: bool = False
    out_by_token: bool = False
    own_order: bool = False
    units: bool = False
    element: str = INTEGER
    scale: torch.dtype = torch.float32
    half: bool = False

    activations: str = field(init=False, compare=False)
    narrow: bool = field(init=False, compare=False)
    exact: bool = field(init=False, compare=False)
    whole: bool = field(init=False, compare=False)
    sums: bool = field(init=False, compare=False)
    halves: bool = field(init=False, compare=False)
    lossless: bool = field(init=False, compare=False)
    rounded: bool = field(init=False, compare=False)
    alike: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Derive the properties that kernels read often."""
        narrow = self.x_dtype.itemsize == 2
        both, added = narrow and self.out_dtype.itemsize == 2, self.zero == FLOAT_ZERO
        table, long = self.element.startswith(TABLE), self.group > LONG_GROUP
        few = self.one_group or long
        vars(self).update(
            activations=INT8 if self.codes else FLOAT,
            narrow=narrow,
            exact=self.x_dtype != torch.bfloat16 or self.out_dtype != self.x_dtype or (added and few),
            whole=both and self.one_group,
            sums=both and added and self.one_group,
            halves=self.bits == 4 and not self.one_group and 0 < self.group < self.block,
            lossless=self.element == "e2m1" and self.scale == torch.int8,
            rounded=table,
            alike=long and (added or table),
        )


def float_problem(form: Form, m: int, x_dtype: torch.dtype, out_dtype: torch.dtype) -> GemmProblem:
    """A product of M rows of floats."""
    weight, split_rows = form.weight(), bucket(TERMS * m) if x_dtype == torch.float32 else 0
    half = form.element == INTEGER and form.factor and torch.float16 == x_dtype == out_dtype
    return GemmProblem(
        form.bits, form.n, form.k, bucket(m), weight.block, form.groups == 1, form.group, weight.zero_kind, x_dtype,
        out_dtype, split_rows, element=form.element, scale=form.scale, half=half,
    )  # fmt: skip


def int8_problem(
    form: Form, m: int, out_dtype: torch.dtype, along_k: tuple[int, bool, int], *,
    x_zero: bool, out_by_token: bool, own_order: bool,
) -> GemmProblem:  # fmt: skip
    """A product of M rows of codes; ``along_k``: step, grouped, per; these and the flags: see `GemmProblem`."""
    weight, (step, grouped, per) = form.weight(), along_k
    return GemmProblem(
        form.bits, form.n, form.k, bucket(m), weight.block, form.groups == 1, form.group, weight.zero_kind,
        out_dtype=out_dtype, codes=True, step=step, grouped=grouped, per=per,
        x_zero=x_zero, out_by_token=out_by_token, own_order=own_order, units=form.units,
    )  # fmt: skip
