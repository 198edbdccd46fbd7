"""`GroupedProblem`: everything that the choice of a kernel for several experts depends on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qcore_triton.geometry import power_of_two
from qcore_triton.weights import INTEGER, Weight

from ..problem import Form, GemmProblem, bucket, float_problem


class Experts(NamedTuple):
    """The packed weights of several experts.

    **Fields:** ``data``, ``scale``, ``zero``: of `Weight`, each with a first dimension E; ``factor``: float32
    ``(E, 1)`` or None; the others: of each of them, as in `Weight`.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    n: int
    k: int
    bits: int
    group: int
    element: str = INTEGER
    factor: Tensor | None = None

    @property
    def number(self) -> int:
        """E."""
        return self.data.shape[0]

    @property
    def first(self) -> Weight:
        """The weight of the first expert: all of them have its form."""
        zero = None if self.zero is None else self.zero[0]
        factor = None if self.factor is None else self.factor[0]
        return Weight(self.data[0], self.scale[0], zero, self.n, self.k, self.bits, self.group, self.element, factor)


class GroupedProblem(NamedTuple):
    """Products of ``experts`` weights with ``rows`` rows in all.

    **Fields:** ``gemm``: the problem of one expert with its share of the rows, as if all experts had equally many;
    ``experts``: E; ``rows``: T; ``codes``: x is bfloat16 codes of int8 activations, which have scales of their own.
    """

    gemm: GemmProblem
    experts: int
    rows: int
    codes: bool = False

    @property
    def exact(self) -> bool:
        """Whether a weight must not be rounded to x's dtype after scaling: codes meet codes, and scales come later."""
        return self.codes or self.gemm.exact

    @property
    def scaled(self) -> bool:
        """Whether weights are scaled before the product, which is faster and must not round what has to be exact."""
        return self.gemm.lossless or not self.exact

    @property
    def busy(self) -> int:
        """The most experts that can have rows."""
        return min(self.experts, self.rows)

    def tiles_at_most(self, bm: int) -> int:
        """The most tiles of ``bm`` rows that there can be: each expert has at most one that is not full."""
        return self.busy + (self.rows - self.busy) // bm


def grouped_problem(
    form: Form, experts: int, rows: int, x_dtype: torch.dtype, out_dtype: torch.dtype, *, codes: bool
) -> GroupedProblem:
    """The problem of ``rows`` rows for ``experts`` weights of a form; ``codes``: activations are int8."""
    share = bucket(-(-rows // min(rows, experts)))
    gemm = float_problem(form, share, torch.bfloat16 if codes else x_dtype, out_dtype)
    return GroupedProblem(gemm, experts, rows, codes)


def expert_slots(experts: int) -> int:
    """The experts that kernels are compiled for: at least 128, so that most models share one kernel."""
    return max(128, power_of_two(experts))
