"""Convolutions on sm_90 by `kernels.conv_hopper`, on the host's side: where it serves, and how it is launched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qcore_triton.geometry import Geometry
from qcore_triton.kernels.conv import column_scales, pixel_extents
from qcore_triton.weights import Weight

from .runtime import hopper
from .runtime.device import Device
from .runtime.launch import launch, options

_ROWS = 128
"""Output positions in a tile."""
_PIXELS = 32
_CODES, _BOXES = 2, 2
"""Stages of codes and of boxes still to be encoded."""


def serves(device: Device, weight: Weight, channels: int, geometry: Geometry, out_dtype: torch.dtype) -> bool:
    """Whether a product of int8 per channel without zero points can be convolved so."""
    fits = channels % 128 == 0 and geometry.stride == (1, 1) and out_dtype.itemsize <= 2
    return fits and hopper.fits(device, weight.n, 128)


def encodes(x: Tensor) -> bool:
    """Whether x ``(B, C, H, W)`` can be encoded on the way, each column by a symmetric scale of its own."""
    return x.dtype == torch.bfloat16 and x.movedim(1, -1).is_contiguous() and x.data_ptr() % 16 == 0


def convolve(
    x: Tensor,
    weight: Weight,
    sums: Tensor | None,
    bias: Tensor | None,
    geometry: Geometry,
    x_numbers: tuple[float, float] | None,
    out_numbers: tuple[float, float] | None,
    size: tuple[int, int],
    out_dtype: torch.dtype,
    device: Device,
) -> Tensor:
    """Rows ``(B * OH * OW, OC)`` of channels-last x ``(B, H, W, C)``; ``size``: ``(OH, OW)``.

    ``x_numbers``: scale and zero point of codes x, which hold what surrounds the image; None for values, which are
    encoded by columns. ``out_numbers``: scale and zero point of int8 results.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .kernels.conv_hopper import convolve as kernel

    layout, (batch, height, width, channels), n = gl.NVMMASharedLayout, x.shape, weight.n
    y = torch.empty((batch, *size, n), dtype=out_dtype, device=x.device)
    encode = x_numbers is None
    top, left = geometry.padding if encode else (0, 0)
    window = (geometry.kernel[1], geometry.kernel[0] * geometry.kernel[1], *geometry.dilation, top, left)
    scales = _column_scales(x, window, size, device) if encode else (weight.scale, weight.scale)
    box, bn = _box(batch, *size), 256 if n > 128 else 128 if n > 64 else 64
    half, piece = _half(box), min(64, bn)
    each = x.element_size()
    pitches = [height * width * channels, width * channels, channels, 1]  # the stride of a side of 1 may be anything
    images = TensorDescriptor(x, [batch, height, width, channels], pitches, [*box, 128], layout(128, each * 8, 4))
    data = weight.data
    w = TensorDescriptor(data, list(data.shape), [data.shape[1], 1], [bn, 128], layout(128, 8, 2))
    each = y.element_size()
    tiles = TensorDescriptor(
        y, [batch, *size, n], list(y.stride()), [*half, piece], layout(min(128, piece * each), each * 8, 4)
    )
    count = [-(-total // part) for total, part in zip((batch, *size), box, strict=True)]
    columns = -(-n // bn)
    room = hopper.ROOM - 2 * _ROWS * piece * each
    if encode:
        stages = min(4, (room - _ROWS * 128 * (2 * _BOXES + _CODES)) // (bn * 128))
    else:
        stages = min(8, room // ((_ROWS + bn) * 128))
    launch(
        kernel, (min(device.sms, count[0] * count[1] * count[2] * columns),),
        images, w, weight.scale, weight.scale if sums is None else sums, *scales, y if bias is None else bias, y, tiles,
        *(x_numbers or (1.0, 0.0)), *(out_numbers or (1.0, 0.0)), batch, *size, n, channels // 128, *count[1:], columns,
        *window,
        SHAPE=box, BN=bn, STAGES=stages, XS=_BOXES, CODES=_CODES, ENCODE=encode, HAS_BIAS=bias is not None,
        OUT=0 if out_numbers is None else 1, **options(device, 4),
    )  # fmt: skip
    return y.view(-1, n)


def _column_scales(x: Tensor, window: tuple[int, ...], size: tuple[int, int], device: Device) -> tuple[Tensor, Tensor]:
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
    """Images, rows and columns of a tile: those that waste least at the borders, of these the widest."""
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
