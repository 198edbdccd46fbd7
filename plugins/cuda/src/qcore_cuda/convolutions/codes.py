"""Codes of images and of columns, for convolutions."""

from __future__ import annotations

import torch
from torch import Tensor

from qcore_triton import host
from qcore_triton.codes import Codes, mode_of
from qcore_triton.geometry import Geometry, column_size, power_of_two
from qcore_triton.kernels.conv import quantize_image
from qcore_triton.weights import Weight

from ..runtime.device import Device, device_of
from ..runtime.launch import launch, options
from ..runtime.replay import empty
from .base import ActivationParameters


def image_codes(x: Tensor, geometry: Geometry, activation: ActivationParameters, device: Device) -> Tensor:
    """Codes int8 ``(B, H + 2 * padding, W + 2 * padding, C)``, the border holding the zero point."""
    batch, channels, height, width = x.shape
    top, left = geometry.padding
    hp, wp = height + 2 * top, width + 2 * left
    q = torch.empty((batch, hp, wp, channels), dtype=torch.int8, device=x.device)
    last = x.stride(1) == 1
    bc = min(256 if last else 64, power_of_two(channels))
    bp = 4096 // bc if last else 64
    launch(
        quantize_image, (-(-hp * wp // bp), -(-channels // bc), batch),
        x, q, float(activation.scale or 1.0), float(activation.zero), channels, height, width, top, left, hp, wp,
        *x.stride(),
        CODES=x.dtype == torch.int8, BP=bp, BC=bc, **options(device, 4),
    )  # fmt: skip
    return q


def column_codes(
    x: Tensor, geometry: Geometry, activation: ActivationParameters, first: int, count: int, weight: Weight
) -> Codes:
    """Codes of ``count`` columns from position ``first`` on, equal to the result of `quantize_rows` for those rows."""
    mode = mode_of(x, activation.symmetric, activation.given)
    size = column_size(geometry.kernel[0] * geometry.kernel[1], x.shape[1])
    meta = options(device_of(x.device), max(1, min(16, size // 1024)))
    return host.quantize_columns(launch, empty, x, geometry, mode, first, count, weight, **meta)
