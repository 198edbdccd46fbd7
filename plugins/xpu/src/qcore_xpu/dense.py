"""Products with float activations: the weight is dequantized, torch multiplies."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qcore.plugin_api import float_conv2d
from qcore_triton import host
from qcore_triton.geometry import Geometry
from qcore_triton.weights import ROWS, Weight

from .biases import split
from .device import empty, exact, launch

_CHUNK = 1 << 24
"""Weights dequantized at a time, 32 MiB of bfloat16: a large weight is never dequantized as a whole."""


def linear(x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``x @ W^T + bias``: x ``(M, K)`` float32, bfloat16 or float16, to ``(M, N)``; in float32 for wider results."""
    dtype = _compute_dtype(x, weight, out_dtype)
    fused, rest = split(bias, dtype)
    x, step = x.to(dtype), max(ROWS, _CHUNK // weight.k // ROWS * ROWS)
    parts = []
    with exact(dtype):
        for first in range(0, weight.n, step):
            count = min(step, weight.n - first)
            part = None if fused is None else fused[first : first + count]
            parts.append(F.linear(x, dense(weight, dtype, first, count), part))
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if rest is not None:
        y = y.float() + rest
    return y.to(out_dtype)


def conv2d(x: Tensor, weight: Weight, bias: Tensor | None, geometry: Geometry, out_dtype: torch.dtype) -> Tensor:
    """X ``(B, IC, H, W)`` to ``(B, OC, OH, OW)``, channels last, like the dequantized weight.

    Convolution weights are small: this one is dequantized whole.
    """
    dtype = _compute_dtype(x, weight, out_dtype)
    w = dense(weight, dtype, 0, weight.n).view(weight.n, *geometry.kernel, -1).permute(0, 3, 1, 2)
    fused, rest = split(bias, dtype)
    x = x.to(dtype).contiguous(memory_format=torch.channels_last)
    with exact(dtype):
        # Core's workaround: oneDNN reads outside images that are narrow for the kernel's dilation or padding.
        y = float_conv2d(x, w, fused, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    if rest is not None:
        y = y.float() + rest.view(-1, 1, 1)
    return y.to(out_dtype).movedim(1, -1).contiguous().movedim(-1, 1)


def dense(weight: Weight, dtype: torch.dtype, first: int, count: int) -> Tensor:
    """Some rows of the dequantized weight ``(count, K)``: computed in float32, rounded once."""
    part = weight if count == weight.n else host.part_of(weight, first, count)
    return host.dense(launch, empty, part, dtype, num_warps=4)


def _compute_dtype(x: Tensor, weight: Weight, out_dtype: torch.dtype) -> torch.dtype:
    """Products of 16-bit numbers are accumulated in float32, but returned in 16 bits."""
    return x.dtype if x.dtype == out_dtype and not weight.rounds_alike else torch.float32
