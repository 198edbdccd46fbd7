"""Elementwise functions, between products of a chain."""

from __future__ import annotations

from ..builder import Builder, Ref, fold
from .prepare import LANES
from .rows import NUMBERS, Rows, new_rows

ELEMENTWISE = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3, "sigmoid": 4, "tanh": 5}
"""Names of the functions, and their numbers in the shader."""


def elementwise(b: Builder, x: Rows, name: str, out: Ref | None = None) -> Rows:
    """A function of each element, computed in float32 and rounded to x's dtype."""
    y = new_rows(b, x.rows, x.columns, x.dtype, out)
    vectors = x.rows * x.pitch * x.dtype.itemsize // 16
    groups = fold(-(-vectors // LANES))
    constants = (LANES, NUMBERS[x.dtype], ELEMENTWISE[name])
    b.dispatch("elementwise", constants, groups, [vectors, groups[0]], [x.ref, *[None] * 6, y.ref])
    return y
