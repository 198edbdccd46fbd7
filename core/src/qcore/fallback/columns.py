"""im2col in pieces: columns of some output positions at a time, so that all passes over them stay in a CPU's cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contracts import Conv2dRequest
from .integer import concatenated
from .weights import chunk_elements

Product = Callable[[Tensor], Tensor]
"""Columns ``(groups, K, M)`` to results ``(OC, M)``."""


def by_pieces(x: Tensor, request: Conv2dRequest, product: Product, column: int) -> Tensor:
    """Apply ``product`` to all columns of x ``(B, IC, H, W)``, giving ``(B, OC, OH, OW)``.

    ``column``: the elements that ``product`` holds at a time for each output position. Positions are computed together
    as long as they fit the device's chunks; in a trace all of them are, because sizes may be symbolic.
    """
    ph, pw = request.padding
    x = x.contiguous()  # one image is copied more quickly than its windows if channels come last
    windows = _windows(F.pad(x, (pw, pw, ph, ph)) if ph or pw else x, request)
    batch, height, width = windows.shape[0], windows.shape[2], windows.shape[3]
    if torch.compiler.is_compiling() or not batch:
        return _results(windows, request, product)
    positions = max(1, chunk_elements(x) // max(1, column))
    sizes = {0: positions // (width * height), 2: positions // width, 3: positions}  # images, rows, columns of results

    def computed(some: Tensor, dims: tuple[int, ...]) -> Tensor:
        if not dims:
            return _results(some, request, product)
        parts = [computed(part, dims[1:]) for part in torch.split(some, max(1, sizes[dims[0]]), dims[0])]
        return concatenated(parts, dims[0])

    return computed(windows, (0, 2, 3))


def _windows(x: Tensor, request: Conv2dRequest) -> Tensor:
    """A view of padded images ``(B, IC, H, W)``: the receptive fields, ``(B, IC, OH, OW, KH, KW)``."""
    axes = zip(request.kernel_size, request.stride, request.dilation, strict=True)
    for dim, (kernel, stride, dilation) in enumerate(axes, start=2):
        x = x.unfold(dim, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    return x


def _results(windows: Tensor, request: Conv2dRequest, product: Product) -> Tensor:
    batch, channels, height, width, kh, kw = windows.shape
    parts = windows.reshape(batch, request.groups, channels // request.groups, height, width, kh, kw)  # a view
    # One copy, in the order of the weight's columns. Positions come last: they are many, and all passes run along them.
    columns = parts.permute(1, 5, 6, 2, 0, 3, 4).reshape(request.groups, request.k, batch * height * width)
    return product(columns).view(request.n, batch, height, width).transpose(0, 1)
