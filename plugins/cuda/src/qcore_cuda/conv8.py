"""Convolutions with int8 activations, on the host's side: an implicit product where it fits, else quantized columns."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from qcore_triton import host
from qcore_triton.codes import Codes, columns_of_codes, mode_of
from qcore_triton.codes import Given as Numbers
from qcore_triton.geometry import Geometry, column_size, power_of_two
from qcore_triton.kernels.conv import gathered, quantize_image
from qcore_triton.weights import Weight

from . import conv_hopper
from .int8 import linear
from .runtime.device import Device, device_of
from .runtime.launch import launch, options
from .runtime.replay import empty

_COLUMN_BYTES = 1 << 25
"""Codes of columns made at a time: they stay in the L2 cache until the product reads them."""
_LEAST_COLUMNS = 128
_EXACT_K = 1 << 15
"""Below this K products and the corrections by zero points fit int32."""


class Given(NamedTuple):
    """How activations are quantized: per column, ``symmetric`` or not, or all by ``scale`` and ``zero``."""

    symmetric: bool
    scale: float | None
    zero: int


class Result(NamedTuple):
    """What comes out: ``dtype``, and for int8 results their scale and zero point."""

    dtype: torch.dtype
    scale: float | None
    zero: int


def conv2d(
    x: Tensor,
    weight: Weight,
    sums: Tensor | None,
    bias: Tensor | None,
    geometry: Geometry,
    given: Given,
    result: Result,
) -> Tensor:
    """X ``(B, IC, H, W)`` to rows ``(B * OH * OW, OC)``; arguments as for `int8.linear`."""
    if geometry.groups > 1:
        one_group = partial(conv2d, given=given, result=result)
        return host.by_channel_groups(one_group, x, weight, sums, bias, geometry)
    device = device_of(x.device)
    plain = weight.bits == 8 and weight.zero is None and weight.scale.shape[0] == 1 and weight.k < _EXACT_K
    boxes = plain and conv_hopper.serves(device, weight, x.shape[1], geometry, result.dtype)
    if plain and given.scale is not None and sums is not None and x.shape[1] % 32 == 0:
        return _implicit(x, weight, sums, bias, geometry, given, result, boxes)
    if boxes and given.scale is None and given.symmetric and conv_hopper.encodes(x):
        size, out = geometry.output(*x.shape[2:]), None if result.scale is None else (result.scale, float(result.zero))
        x = x.movedim(1, -1)
        return conv_hopper.convolve(x, weight, None, bias, geometry, None, out, size, result.dtype, device)
    return _by_columns(x, weight, sums, bias, geometry, given, result)


def _implicit(
    x: Tensor,
    weight: Weight,
    sums: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    given: Given,
    result: Result,
    boxes: bool,
) -> Tensor:
    """One scale for all of x: the product gathers its columns itself."""
    device, (batch, channels, height, width) = device_of(x.device), x.shape
    oh, ow = geometry.output(height, width)
    m, n = batch * oh * ow, weight.n
    q = image_codes(x, geometry, given, device)
    if boxes:
        numbers = (float(given.scale or 1.0), float(given.zero))
        out = None if result.scale is None else (result.scale, float(result.zero))
        return conv_hopper.convolve(q, weight, sums, bias, geometry, numbers, out, (oh, ow), result.dtype, device)
    y = torch.empty((m, n), dtype=result.dtype, device=x.device)
    bk = next(size for size in (128, 64, 32) if channels % size == 0)
    bm, bn, warps, stages = _tile(m, n, device)
    launch(
        gathered,
        (-(-m // bm) * -(-n // bn),),
        q,
        weight.data,
        weight.scale,
        sums,
        y if bias is None else bias,
        y,
        float(given.scale or 1.0),
        float(given.zero),
        float(result.scale or 1.0),
        float(result.zero),
        m,
        n,
        channels // 32,
        weight.data.shape[1] // 32,
        oh,
        ow,
        q.shape[1],
        q.shape[2],
        *geometry.stride,
        *geometry.dilation,
        geometry.kernel[1],
        geometry.kernel[0] * geometry.kernel[1],
        BK=bk,
        BN=bn,
        BM=bm,
        STAGES=stages,
        GROUP_M=8,
        HAS_BIAS=bias is not None,
        OUT=0 if result.scale is None else 1,
        ALIGNED=n % 16 == 0,
        **options(device, warps),
    )
    return y


def _tile(m: int, n: int, device: Device) -> tuple[int, int, int, int]:
    """BM, BN, warps and stages."""
    if device.arch == 0 or device.arch < 80:
        return 64, 64, 4, 2
    if n > 128 and n % 16 == 0 and -(-m // 128) * -(-n // 256) >= device.sms:
        return (128, 256, 8, 4) if device.arch in {100, 103} else (128, 128, 4 if device.arch == 90 else 8, 3)
    if n > 64 and -(-m // 128) * -(-n // 128) >= device.sms:
        return 128, 128, 8, 3
    return (128, 64, 4, 3) if n > 32 else (128, 32, 4, 3)


def image_codes(x: Tensor, geometry: Geometry, given: Given, device: Device) -> Tensor:
    """Codes ``(B, H + 2 * padding, W + 2 * padding, C)``, the border holding the zero point."""
    batch, channels, height, width = x.shape
    top, left = geometry.padding
    hp, wp = height + 2 * top, width + 2 * left
    q = torch.empty((batch, hp, wp, channels), dtype=torch.int8, device=x.device)
    last = x.stride(1) == 1
    bc = min(256 if last else 64, power_of_two(channels))
    bp = 4096 // bc if last else 64
    launch(
        quantize_image,
        (-(-hp * wp // bp), -(-channels // bc), batch),
        x,
        q,
        float(given.scale or 1.0),
        float(given.zero),
        channels,
        height,
        width,
        top,
        left,
        hp,
        wp,
        *x.stride(),
        CODES=x.dtype == torch.int8,
        BP=bp,
        BC=bc,
        **options(device, 4),
    )
    return q


def _by_columns(
    x: Tensor,
    weight: Weight,
    sums: Tensor | None,
    bias: Tensor | None,
    geometry: Geometry,
    given: Given,
    result: Result,
) -> Tensor:
    oh, ow = geometry.output(*x.shape[2:])
    rows = x.shape[0] * oh * ow
    step = max(_LEAST_COLUMNS, _COLUMN_BYTES // columns_of_codes(weight.k) // 128 * 128)
    out = None if result.scale is None else Numbers(result.scale, result.zero)
    parts = []
    for first in range(0, rows, step):
        codes = column_codes(x, geometry, given, first, min(step, rows - first), weight)
        parts.append(linear(codes, weight, sums, bias, result.dtype, out))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def column_codes(x: Tensor, geometry: Geometry, given: Given, first: int, count: int, weight: Weight) -> Codes:
    """Codes of ``count`` columns from position ``first`` on, as `quantize_rows` would make them of those rows."""
    mode = mode_of(x, given.symmetric, None if given.scale is None else Numbers(given.scale, given.zero))
    size = column_size(geometry.kernel[0] * geometry.kernel[1], x.shape[1])
    meta = options(device_of(x.device), max(1, min(16, size // 1024)))
    return host.quantize_columns(launch, empty, x, geometry, mode, first, count, weight, **meta)
