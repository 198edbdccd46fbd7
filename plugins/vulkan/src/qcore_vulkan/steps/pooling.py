"""Pooling: the largest elements or the means of windows over images."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..builder import Builder, fold
from .convolution import Pair
from .operand import Operand, new
from .prepare import LANES

_LARGEST, _MEAN = 0, 1


@dataclass(frozen=True)
class Windows:
    """Height and width of each window, the steps between windows, padding around the image and steps within windows.

    ``None`` in the place of windows: they divide the image as evenly as they can, as adaptive pooling does.
    """

    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)


def max_pool(
    b: Builder, x: Operand, windows: Windows | None, size: Pair, *, indexed: bool = False
) -> tuple[Operand, Operand | None]:
    """Maxima of windows of x ``(N, C, H, W)`` float32: ``(N, C, *size)``, and int32 places ``row * W + column``.

    NaN is the largest, and padding never is. Places only if ``indexed``; x may have any strides.
    """
    y = new(b, (*x.shape[:2], *size), torch.float32)
    indices = new(b, y.shape, torch.int32) if indexed else None
    _launch(b, _LARGEST, x, windows, y, indices, 0, 0)
    return y, indices


def mean_pool(
    b: Builder, x: Operand, windows: Windows | None, size: Pair, *, padded: bool = True, divisor: int = 0
) -> Operand:
    """The mean of each window of x ``(N, C, H, W)`` float32: ``(N, C, *size)``.

    ``padded``: padding counts as elements of value 0. ``divisor``: what sums are divided by, if not 0.
    """
    y = new(b, (*x.shape[:2], *size), torch.float32)
    _launch(b, _MEAN, x, windows, y, None, int(padded), divisor)
    return y


def _launch(
    b: Builder, function: int, x: Operand, windows: Windows | None, y: Operand, indices: Operand | None,
    padded: int, divisor: int,
) -> None:  # fmt: skip
    if y.numel == 0:
        return
    w = Windows((1, 1), (1, 1)) if windows is None else windows
    words = [height | width << 16 for height, width in (w.kernel, w.stride, w.padding, w.dilation)]
    push = [y.numel, x.shape[1], *y.shape[2:], *x.shape[2:], *words, padded, divisor, *x.strides, x.offset]
    refs = [x.ref, *[None] * 5, y.ref if indices is None else indices.ref, y.ref]
    constants = (LANES, function, int(windows is None), int(indices is not None))
    b.dispatch("pool", constants, fold(-(-y.numel // LANES)), push, refs)
