"""Convolutions with int8 activations: columns of the image are quantized in chunks, then multiplied."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from qcore_triton import host
from qcore_triton.codes import columns_of_codes, mode_of
from qcore_triton.geometry import Geometry, column_size, power_of_two
from qcore_triton.weights import Weight

from . import tiles
from .device import empty, launch, options, sub_groups
from .tiles import How

_COLUMN_BYTES = 1 << 23
"""Codes of columns made at a time: a cache of 16 MiB still holds them when the product reads them."""
_LEAST_COLUMNS = 128
_IN_REGISTERS = 8192
"""Values of columns that share a program."""


def conv2d(x: Tensor, weight: Weight, sums: Tensor | None, bias: Tensor | None, geometry: Geometry, how: How) -> Tensor:
    """X ``(B, IC, H, W)`` to rows ``(B * OH * OW, OC)``; other arguments as for `tiles.product`."""
    if geometry.groups == 1:
        return _one_group(x, weight, sums, bias, geometry, how)
    return host.by_channel_groups(partial(_one_group, how=how), x, weight, sums, bias, geometry)


def _one_group(
    x: Tensor, weight: Weight, sums: Tensor | None, bias: Tensor | None, geometry: Geometry, how: How
) -> Tensor:
    oh, ow = geometry.output(*x.shape[2:])
    rows, mode = x.shape[0] * oh * ow, mode_of(x, how.symmetric, how.given)
    step = max(_LEAST_COLUMNS, _COLUMN_BYTES // columns_of_codes(weight.k) // 128 * 128)
    size = column_size(geometry.kernel[0] * geometry.kernel[1], x.shape[1])
    together = max(1, min(power_of_two(rows), _IN_REGISTERS // size))
    meta = options(sub_groups(together * size))
    parts = []
    for first in range(0, rows, step):
        count = min(step, rows - first)
        codes = host.quantize_columns(launch, empty, x, geometry, mode, first, count, weight, columns=together, **meta)
        parts.append(tiles.linear(codes, weight, sums, bias, how))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
