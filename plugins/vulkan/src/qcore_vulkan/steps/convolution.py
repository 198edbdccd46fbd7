"""`conv2d` as steps: a product over columns that are gathered as they are prepared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from qcore import OutputInt8, PluginError
from qcore.plugin_api import convolved_size

from ..builder import Builder, Ref
from ..device import Buffer
from ..layout import DeviceWeight
from .direct import convolve, is_direct
from .finish import finish
from .linear import linear, scratch_row
from .prepare import Activation, Source, Window
from .product import multiply
from .rows import Rows, local, new_rows, row_parts

Pair = tuple[int, int]

_MOST_COLUMNS = 1 << 21
"""The most values of a column that shaders can index with float32."""
_MOST_STEP = (1 << 16) - 1
"""Strides, padding and dilation: two of them share a word."""


@dataclass(frozen=True)
class Geometry2d:
    """Height and width of kernel, stride, padding and dilation, and the number of channel groups.

    ``after``: the padding below and to the right, if it is not that above and to the left; -1: the last row of
    pixels, or the last column, is not read.
    """

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    after: Pair | None = None

    def output(self, height: int, width: int) -> Pair:
        """(OH, OW) for an image of (height, width)."""
        (above, left), (below, right) = self.padding, self.padding if self.after is None else self.after
        padded = (height + above + below, width + left + right)
        return convolved_size(padded, self.kernel, self.stride, (0, 0), self.dilation)

    def reach(self, axis: int, count: int) -> int:
        """Rows of pixels, or columns, that ``count`` adjacent results depend on."""
        return (count - 1) * self.stride[axis] + self.dilation[axis] * (self.kernel[axis] - 1) + 1

    def part(self, size: Pair, rows: Pair, columns: Pair) -> tuple[Geometry2d, Pair, Pair]:
        """The convolution for results ``rows`` x ``columns`` of an image of ``size``, and the pixels that it reads."""
        whole = self.output(*size)
        if (rows, columns) == ((0, whole[0]), (0, whole[1])):
            return self, (0, size[0]), (0, size[1])
        (ys, above, below), (xs, left, right) = (self._pixels(i, size[i], one) for i, one in enumerate((rows, columns)))
        return replace(self, padding=(above, left), after=(below, right)), ys, xs

    def _pixels(self, axis: int, size: int, span: Pair) -> tuple[Pair, int, int]:
        """Pixels that a span of results depends on, and the padding before and after them."""
        reach = self.reach(axis, span[1] - span[0])
        first = span[0] * self.stride[axis] - self.padding[axis]
        start, stop = max(0, first), min(size, first + reach)
        if start < stop:
            return (start, stop), start - first, first + reach - stop
        return (0, 1), reach, -1  # only padding: one pixel beyond it, since an image has at least one

    @property
    def is_pointwise(self) -> bool:
        """Whether the columns are the pixels."""
        padded = self.padding != (0, 0) or self.after not in (None, (0, 0))
        return (self.kernel, self.stride, self.groups, padded) == ((1, 1), (1, 1), 1, False)

    def why_not(self, k: int) -> str:
        """Why shaders cannot gather columns of ``k`` values, in a sentence; empty if they can."""
        if k > _MOST_COLUMNS and not self.is_pointwise:
            return f"a convolution with columns of {k} values has no kernel here; the limit is {_MOST_COLUMNS}."
        step = max(*self.stride, *self.padding, *self.dilation)
        if step > _MOST_STEP:
            return f"a stride, padding or dilation of {step} has no kernel here; the limit is {_MOST_STEP}."
        return ""

    @property
    def words(self) -> tuple[int, ...]:
        """Kernel width, stride, padding and dilation as shaders take them."""
        return self.kernel[1], *(height | width << 16 for height, width in (self.stride, self.padding, self.dilation))


@dataclass(frozen=True)
class Image:
    """Images ``(batch, height, width, channels)``: ``rows`` are the pixels."""

    rows: Rows
    batch: int
    channels: int
    height: int
    width: int


def conv2d(
    b: Builder,
    x: Image,
    weight: DeviceWeight,
    bias: Buffer | None,
    geometry: Geometry2d,
    activation: Activation | None,
    output: OutputInt8 | None,
    out_dtype: torch.dtype,
    out: Ref | None = None,
) -> Image:
    """The convolution of images with a weight ``(OC, KH*KW*IC/groups)``: see the contract `conv2d`."""
    if reason := geometry.why_not(weight.geometry.k):
        raise PluginError(reason)
    height, width = geometry.output(x.height, x.width)
    if geometry.is_pointwise:
        y = linear(b, x.rows, weight, bias, activation, output, out_dtype, out=out)
        return Image(y, x.batch, y.columns, height, width)
    y = new_rows(b, x.batch * height * width, weight.geometry.n, out_dtype, out)
    pixels = local(b, x.rows)
    channels = x.channels // geometry.groups
    sizes = (x.height, x.width, height, width, *geometry.words, 1 / channels, 1 / geometry.kernel[1])
    for start, count in row_parts(b, y.rows, scratch_row(weight, output) * geometry.groups):
        window = Window(count, geometry.groups, channels, start, sizes)
        part = y.part(start, count)
        product = part if output is None else new_rows(b, count, y.columns, torch.float32)
        source = Source(pixels, window)
        if is_direct(weight, geometry.groups):
            convolve(b, source, weight, bias, activation, product)
        else:
            multiply(b, source, weight, bias, activation, {}, product)
        if output is not None:
            finish(b, product, part, output, {})
    return Image(y, x.batch, y.columns, height, width)
