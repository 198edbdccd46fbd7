"""The problem that a kernel is selected for, and the interface of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ..builder import Builder
from ..layout import Geometry, Part
from .experts import Added
from .prepare import Activation, is_asymmetric, is_symmetric
from .rows import FloatRows, Int8Rows, Rows

Activations = Rows | FloatRows | Int8Rows


@dataclass(frozen=True)
class GemmProblem:
    """The problem that a kernel is selected for.

    **Fields:** ``op``: which activations are multiplied; ``m``: rows; ``asymmetric``: as in `Int8Rows`; ``symmetric``:
    whether each row of x is quantized by its own symmetric scale; ``coarse``: as in `Rows`; ``experts``: whether rows
    are sorted by expert; ``m`` is what an expert has on average then.
    """

    op: Literal["gemm_float", "gemm_int"]
    m: int
    geometry: Geometry
    x_dtype: torch.dtype
    out_dtype: torch.dtype
    asymmetric: bool
    symmetric: bool = False
    coarse: bool = False
    experts: bool = False

    @classmethod
    def of(
        cls,
        activation: Activation | None,
        m: int,
        geometry: Geometry,
        dtypes: tuple[torch.dtype, torch.dtype],
        *,
        window: bool = False,
        coarse: bool = False,
        experts: bool = False,
    ) -> GemmProblem:
        """That of a scheme's activations; ``dtypes``: of x and the result; ``window``: a convolution's columns."""
        if activation is None:
            return cls("gemm_float", m, geometry, *dtypes, False, coarse=coarse, experts=experts)
        form = is_asymmetric(activation), is_symmetric(activation) and not window
        return cls("gemm_int", m, geometry, *dtypes, *form, experts=experts)


class GemmKernel(Protocol):
    """A kernel."""

    @property
    def form(self) -> Literal["float32", "float16", "int8", "rows"]:
        """The activations that it needs; "rows": the input as is, or float32 rows of a convolution."""

    def append(self, b: Builder, x: Activations, part: Part, geometry: Geometry, bias: Added, out: Rows) -> None:
        """Append its steps: columns ``part.first`` ... of ``out``, which is float32, float16 or bfloat16.

        With experts: the rows of the experts of ``part``.
        """
