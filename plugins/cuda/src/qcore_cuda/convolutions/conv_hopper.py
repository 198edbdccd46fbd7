"""`CONV_HOPPER`: convolutions of stride 1 on sm_90: one warp copies boxes of the image, two warpgroups multiply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from qcore_triton.kernels.conv import column_scales, pixel_extents

from ..products.aligned import finished, result
from ..runtime import hopper
from ..runtime.device import Device
from ..runtime.launch import launch, options
from .base import ConvCall, Convolution
from .codes import image_codes

_ROWS = 128
"""Output positions in a tile."""
_PIXELS = 32
"""Pixels of 256 channels whose maxima one program computes."""
_CODES, _BOXES = 2, 2
"""Pipeline stages: of codes, and of boxes that are quantized in the kernel."""


class Box(NamedTuple):
    """**Fields:** ``shape``: images, rows and columns of the positions of a tile; ``bn``: its output channels."""

    shape: tuple[int, int, int]
    bn: int


class ConvHopper(Convolution[Box]):
    """See `kernels.conv_hopper`."""

    name: ClassVar[str] = "conv_hopper"

    def serves(self, device: Device, call: ConvCall) -> bool:
        """Int8 per channel, whole blocks of channels, stride 1, results of one or two bytes.

        All of x has one scale, or each column has a symmetric one and x can be encoded on the way.
        """
        fits = call.x.shape[1] % 128 == 0 and call.geometry.stride == (1, 1) and call.result.dtype.itemsize <= 2
        supported = call.per_channel and fits and hopper.fits(device, 128)
        return supported and (call.one_scale or _encodes(call))

    def candidates(self, device: Device, call: ConvCall) -> Iterator[Box]:
        del device
        n = call.weight.n
        yield Box(_box(call.x.shape[0], *call.size), 256 if n > 128 else 128 if n > 64 else 64)

    def launch(self, call: ConvCall, device: Device, config: Box) -> Tensor:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from ..kernels.conv_hopper import convolve

        layout, weight, bias, size, n = gl.NVMMASharedLayout, call.weight, call.bias, call.size, call.weight.n
        box, bn, encode = *config, call.activation.scale is None
        x = call.x.movedim(1, -1) if encode else image_codes(call.x, call.geometry, call.activation, device)
        batch, height, width, channels = x.shape
        y = result(batch * size[0] * size[1], n, call.result.dtype, x.device)
        wide = y.shape[1]
        top, left = call.geometry.padding if encode else (0, 0)  # codes come with their border
        kernel = call.geometry.kernel
        window = (kernel[1], kernel[0] * kernel[1], *call.geometry.dilation, top, left)
        scales = _column_scales(x, window, size, device) if encode else (weight.scale, weight.scale)
        half, piece = _half(box), min(64, bn)
        each = x.element_size()
        # Not the tensor's own strides: that of a side of length 1 may be anything.
        pitches = [height * width * channels, width * channels, channels, 1]
        images = TensorDescriptor(x, [batch, height, width, channels], pitches, [*box, 128], layout(128, each * 8, 4))
        data = weight.data
        w = TensorDescriptor(data, list(data.shape), [data.shape[1], 1], [bn, 128], layout(128, 8, 2))
        each = y.element_size()
        pitches = [size[0] * size[1] * wide, size[1] * wide, wide, 1]
        swizzle = layout(min(128, piece * each), each * 8, 4)
        tiles = TensorDescriptor(y, [batch, *size, wide], pitches, [*half, piece], swizzle)
        count = [-(-total // part) for total, part in zip((batch, *size), box, strict=True)]
        columns = -(-n // bn)
        numbers = (1.0, 0.0) if encode else (float(call.activation.scale or 1.0), float(call.activation.zero))
        launch(
            convolve, (min(device.sms, count[0] * count[1] * count[2] * columns),),
            images, w, weight.scale, weight.scale if encode else call.sums, *scales, y if bias is None else bias, y,
            tiles, *numbers, *call.result.numbers, batch, *size, n, channels // 128, *count[1:], columns, *window,
            SHAPE=box, BN=bn, STAGES=_stages(bn, piece * each, encode=encode), XS=_BOXES, CODES=_CODES, ENCODE=encode,
            ALIGNED=n % 16 == 0, HAS_BIAS=bias is not None, OUT=0 if call.result.scale is None else 1,
            **options(device, 4),
        )  # fmt: skip
        return finished(y, n, device)


def _encodes(call: ConvCall) -> bool:
    """Whether x can be encoded on the way, each column by a symmetric scale of its own: channels-last bfloat16."""
    x, (symmetric, scale, _) = call.x, call.activation
    if scale is not None or not symmetric or x.dtype != torch.bfloat16:
        return False
    return x.movedim(1, -1).is_contiguous() and x.data_ptr() % 16 == 0


def _stages(bn: int, piece: int, *, encode: bool) -> int:
    """Stages that fit next to four pieces of the result, whose rows have ``piece`` bytes."""
    room = hopper.ROOM - 2 * _ROWS * piece
    if encode:
        return min(4, (room - _ROWS * 128 * (2 * _BOXES + _CODES)) // (bn * 128))
    return min(8, room // ((_ROWS + bn) * 128))


def _column_scales(x: Tensor, window: tuple[int, ...], size: tuple[int, int], device: Device) -> tuple[Tensor, Tensor]:
    """Symmetric scales float32 ``(M,)`` of the columns of x ``(B, H, W, C)``, and the factors of their values."""
    batch, height, width, channels = x.shape
    pixels, m = batch * height * width, batch * size[0] * size[1]
    extent = torch.empty((pixels,), dtype=torch.int32, device=x.device)
    scale, inverse = (torch.empty((m,), dtype=torch.float32, device=x.device) for _ in range(2))
    block = 1 << (channels - 1).bit_length()
    at_once = max(1, _PIXELS * 256 // block)
    launch(
        pixel_extents, (-(-pixels // at_once),), x, extent, pixels, channels, BP=at_once, BC=block, **options(device, 4)
    )
    kw, taps, dilation_h, dilation_w, top, left = window
    launch(
        column_scales, (-(-m // 256),),
        extent, scale, inverse, m, height, width, *size, top, left, dilation_h, dilation_w, kw, taps,
        BM=256, **options(device, 4),
    )  # fmt: skip
    return scale, inverse


def _box(batch: int, height: int, width: int) -> tuple[int, int, int]:
    """Images, rows and columns of a tile: of the boxes that waste the fewest positions at the borders, the widest."""
    sizes = [1 << i for i in range(_ROWS.bit_length())]
    boxes = [(_ROWS // (h * w), h, w) for w in sizes for h in sizes if h * w <= _ROWS]

    def cost(box: tuple[int, int, int]) -> Any:
        b, h, w = box
        return -(-batch // b) * -(-height // h) * -(-width // w), -w, -h

    return min(boxes, key=cost)


def _half(box: tuple[int, int, int]) -> tuple[int, int, int]:
    """The part of a box that one warpgroup computes."""
    b, h, w = box
    return (b // 2, h, w) if b > 1 else (1, h // 2, w) if h > 1 else (1, 1, w // 2)


CONV_HOPPER = ConvHopper()
