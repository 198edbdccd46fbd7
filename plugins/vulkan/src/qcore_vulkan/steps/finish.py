"""Requantization of results to int8."""

from __future__ import annotations

from collections.abc import Mapping

from qcore import OutputInt8

from ..builder import Builder, Ref, fold
from .prepare import LANES
from .rows import Rows


def finish(b: Builder, y: Rows, out: Rows, output: OutputInt8, given: Mapping[str, Ref]) -> None:
    """Float32 ``y`` to int8 codes in ``out``. ``given``: out_scale and out_zero_point per row, if per token."""
    tokens = [given["out_scale"], given["out_zero_point"]] if output.per_token else [y.ref, y.ref]
    groups = fold(-(-y.rows * -(-y.columns // 4) // LANES))
    scale = 1.0 if output.scale is None else output.scale
    push = [y.rows, y.columns, y.pitch, out.pitch, groups[0], int(output.per_token), scale, output.zero_point]
    b.dispatch("finish", (LANES,), groups, push, [y.ref, *tokens, *[None] * 4, out.ref])
