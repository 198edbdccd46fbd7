"""`linear` and `grouped_linear` as steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from qcore import OutputInt8

from ..builder import Builder, Ref
from ..device import Buffer
from ..layout import DeviceWeight
from .experts import Ends
from .finish import finish
from .prepare import Activation, Source
from .product import multiply
from .rows import Rows, new_rows, row_parts

_NOTHING: Mapping[str, Ref] = {}


def linear(
    b: Builder,
    x: Rows,
    weight: DeviceWeight,
    bias: Buffer | None,
    activation: Activation | None,
    output: OutputInt8 | None,
    out_dtype: torch.dtype,
    given: Mapping[str, Ref] = _NOTHING,
    out: Ref | None = None,
) -> Rows:
    """``A(x) @ W^T + bias``, x ``(M, K)`` to ``(M, N)``: see the contract `linear`.

    **Arguments:** ``bias``: float32 ``(N,)``; ``given``: vectors of M by name, scales float32 and zero points int32;
    ``out``: memory for the result, of `rows_bytes`; None: scratch memory.
    """
    y = new_rows(b, x.rows, weight.geometry.n, out_dtype, out)
    for start, count in row_parts(b, x.rows, scratch_row(weight, output)):
        vectors = {name: ref.part(4 * start, 4 * count) for name, ref in given.items()}
        source, part = Source(x.part(start, count)), y.part(start, count)
        product = part if output is None else new_rows(b, count, y.columns, torch.float32)
        multiply(b, source, weight, bias, activation, vectors, product)
        if output is not None:
            finish(b, product, part, output, vectors)
    return y


def grouped_linear(
    b: Builder,
    x: Rows,
    weight: DeviceWeight,
    ends: Ends,
    activation: Activation | None,
    out_dtype: torch.dtype,
    out: Ref | None = None,
) -> Rows:
    """Each row of x ``(T, K)`` by the weight of its expert, to ``(T, N)``: see the contract `grouped_linear`.

    Rows of no expert give 0. ``out``: as of `linear`.
    """
    y = new_rows(b, x.rows, weight.geometry.n, out_dtype, out)
    for start, count in row_parts(b, x.rows, scratch_row(weight, None)):
        own = replace(ends, row=ends.row + start)
        multiply(b, Source(x.part(start, count)), weight, own, activation, {}, y.part(start, count))
    return y


def scratch_row(weight: DeviceWeight, output: OutputInt8 | None) -> int:
    """The most bytes per row of activations in the largest piece of scratch memory."""
    g = weight.geometry
    return max(4 * g.columns, 4 * g.n if output else 0)
