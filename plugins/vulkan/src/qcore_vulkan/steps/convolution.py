"""`conv2d` as steps: a product over columns that are gathered as they are prepared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qcore import OutputInt8, PluginError

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
"""Values of a column that shaders find their way in with float32."""


@dataclass(frozen=True)
class Geometry2d:
    """Height and width of kernel, stride, padding and dilation, and the number of channel groups."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    def output(self, height: int, width: int) -> Pair:
        """(OH, OW) for an image of (height, width)."""
        sizes = zip((height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        oh, ow = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        return oh, ow

    @property
    def is_pointwise(self) -> bool:
        """Whether the columns are the pixels."""
        return (self.kernel, self.stride, self.padding, self.groups) == ((1, 1), (1, 1), (0, 0), 1)

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
    height, width = geometry.output(x.height, x.width)
    if geometry.is_pointwise:
        y = linear(b, x.rows, weight, bias, activation, output, out_dtype, out=out)
        return Image(y, x.batch, y.columns, height, width)
    y = new_rows(b, x.batch * height * width, weight.geometry.n, out_dtype, out)
    if weight.geometry.k > _MOST_COLUMNS:
        raise PluginError(f"a convolution with columns of {weight.geometry.k} values: at most {_MOST_COLUMNS} here")
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
