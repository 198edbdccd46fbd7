"""``torch.ops.qcore_cuda.conv2d_*``: convolutions, whose results are channels-last."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qcore_triton import channel_groups
from qcore_triton.geometry import Geometry
from qcore_triton.weights import Weight, bias_of, check_devices

from .ops import define, device_guard, needs_guard
from .runtime.device import device_of
from .runtime.launch import launch, options

# ruff: noqa: ARG001 - a fake has the signature of its op

_Pair = list[int]


def conv2d_a8(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor | None, bias: Tensor | None,
    n: int, k: int, bits: int, group: int, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, groups: int,
    symmetric: bool, static_scale: float | None, static_zero_point: int,
    output_scale: float | None, output_zero_point: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Int8 activations: x ``(B, IC, H, W)`` to ``(B, OC, OH, OW)``; other arguments as for `ops.linear_a8`."""
    check_devices(x, data, {"bias": bias})
    if needs_guard(x):
        with device_guard(x):
            return conv2d_a8(
                x, data, scale, zero, sums, bias, n, k, bits, group, kernel, stride, padding, dilation, groups,
                symmetric, static_scale, static_zero_point, output_scale, output_zero_point, out_dtype,
            )  # fmt: skip
    from .convolutions.base import ActivationParameters, Result
    from .int8_conv import conv2d

    geometry = Geometry.of(kernel, stride, padding, dilation, groups)
    size = geometry.output(*x.shape[2:])
    if not x.shape[0]:
        return _image(x.new_empty((0, n), dtype=out_dtype), x, size)
    y = conv2d(
        x,
        Weight(data, scale, zero, n, k, bits, group),
        sums,
        bias_of(bias, n),
        geometry,
        ActivationParameters(symmetric, static_scale, static_zero_point),
        Result(out_dtype, output_scale, output_zero_point),
    )
    return _image(y, x, size)


def conv2d_a16(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, factor: Tensor | None,
    n: int, k: int, bits: int, group: int, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, groups: int,
    element: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Float activations: the weight is dequantized; torch convolves in x's dtype, in float32 for wider results."""
    check_devices(x, data, {"bias": bias})
    if needs_guard(x):
        with device_guard(x):
            return conv2d_a16(
                x, data, scale, zero, bias, factor, n, k, bits, group,
                kernel, stride, padding, dilation, groups, element, out_dtype,
            )  # fmt: skip
    from qcore_triton.host import channels_last

    from .products.dense import dequantized

    bias = bias_of(bias, n)
    weight = Weight(data, scale, zero, n, k, bits, group, element, factor)
    dtype = x.dtype if x.dtype == out_dtype and not weight.rounds_alike else torch.float32
    w = dequantized(weight, dtype).view(n, *kernel, -1).permute(0, 3, 1, 2)
    fused = bias if bias is not None and bias.dtype == dtype else None
    x = x.to(dtype)
    if dtype != torch.float32:
        x = channels_last(launch, x, **options(device_of(x.device), 4))  # as tensor cores need it; w has it already
    cudnn = torch.backends.cudnn
    as_it_is = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
    exact = cudnn.flags(**as_it_is, allow_tf32=False) if dtype == torch.float32 else contextlib.nullcontext()
    with exact:
        y = F.conv2d(x, w, fused, stride, padding, dilation, groups)
    if bias is not None and fused is None:
        y = y.float() + bias.float().view(-1, 1, 1)
    return _last(y.to(out_dtype))


def conv2d_groups_a8(x: Tensor, *arguments: Any) -> Tensor:
    """Int8 activations in narrow channel groups, see `qcore_triton.channel_groups`."""
    if needs_guard(x):
        with device_guard(x):
            return conv2d_groups_a8(x, *arguments)
    device = device_of(x.device)
    return channel_groups.convolve(launch, x, *arguments, asm=device.asm, **options(device, 4))


def _image(y: Tensor, x: Tensor, size: tuple[int, int]) -> Tensor:
    return y.view(x.shape[0], *size, y.shape[1]).movedim(-1, 1)


def _last(y: Tensor) -> Tensor:
    """Return y with the strides of `_image`, which the fake reports."""
    return y.movedim(1, -1).contiguous().movedim(-1, 1)


def _fake(x: Tensor, n: int, out_dtype: torch.dtype, sizes: tuple[_Pair, _Pair, _Pair, _Pair]) -> Tensor:
    size = Geometry.of(*sizes, 1).output(*x.shape[2:])
    return x.new_empty((x.shape[0], *size, n), dtype=out_dtype).movedim(-1, 1)


def _conv2d_a8_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor | None, bias: Tensor | None,
    n: int, k: int, bits: int, group: int, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, *rest: Any,
) -> Tensor:  # fmt: skip
    return _fake(x, n, rest[-1], (kernel, stride, padding, dilation))


def _conv2d_a16_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, factor: Tensor | None,
    n: int, k: int, bits: int, group: int, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, *rest: Any,
) -> Tensor:  # fmt: skip
    return _fake(x, n, rest[-1], (kernel, stride, padding, dilation))


_SIZES = "int n, int k, int bits, int group, int[2] kernel, int[2] stride, int[2] padding, int[2] dilation, int groups"

op_conv2d_a8 = define(
    f"conv2d_a8(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? sums, Tensor? bias, {_SIZES}, "
    f"bool symmetric, float? static_scale, int static_zero_point, float? output_scale, int output_zero_point, "
    f"ScalarType out_dtype) -> Tensor",
    conv2d_a8,
    _conv2d_a8_fake,
)
op_conv2d_a16 = define(
    f"conv2d_a16(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? bias, Tensor? factor, {_SIZES}, "
    f"str element, ScalarType out_dtype) -> Tensor",
    conv2d_a16,
    _conv2d_a16_fake,
)
op_conv2d_groups_a8 = define(channel_groups.SCHEMA, conv2d_groups_a8, channel_groups.fake)
