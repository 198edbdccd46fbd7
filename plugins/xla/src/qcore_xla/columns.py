"""Convolutions as products: the columns of an image, gathered by one strided copy in torch."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore.plugin_api import convolved_size

from .calls import Call, Given, Weight, linear
from .views import whole

Pair = tuple[int, ...]


class Geometry(NamedTuple):
    """Kernel size, stride, padding and dilation as (height, width), and the number of channel groups."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    def output(self, height: int, width: int) -> Pair:
        """(OH, OW) for an image of (height, width)."""
        return convolved_size((height, width), self.kernel, self.stride, self.padding, self.dilation)


def convolve(
    x: Tensor, weight: Weight, bias: Tensor | None, given: Given, call: Call, geometry: Geometry, filling: int
) -> Tensor:
    """``conv2d(A(x), W) + bias``; ``filling``: the value of padding."""
    batch, (oh, ow) = x.shape[0], geometry.output(x.shape[2], x.shape[3])
    n, heads = call.plan.n, geometry.groups
    if not batch:
        return x.new_empty((0, oh, ow, n), dtype=call.out_dtype).movedim(-1, 1)
    found = whole(partial(columns, geometry=geometry, filling=filling), x)  # (H, M, K)
    y = linear(found[0] if heads == 1 else found, weight, bias, given, call)
    if heads > 1:
        y = y.movedim(0, 1).reshape(-1, n)
    return y.view(batch, oh, ow, n).movedim(-1, 1)


def columns(x: Tensor, geometry: Geometry, filling: int) -> Tensor:
    """Columns of x ``(B, IC, H, W)`` in (KH, KW, IC) order: ``(groups, B * OH * OW, KH * KW * IC/groups)``."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw), groups = geometry
    batch, channels, height, width = x.shape
    oh, ow = geometry.output(height, width)
    image = x.movedim(1, -1)
    image = pad(image, (0, 0, pw, pw, ph, ph), value=filling) if ph or pw else image.contiguous()
    b, h, w, c = image.stride()
    each = channels // groups
    size = (groups, batch, oh, ow, kh, kw, each)
    view = image.as_strided(size, (each * c, b, sh * h, sw * w, dh * h, dw * w, c), image.storage_offset())
    return torch.flatten(view, 4).flatten(1, 3)
