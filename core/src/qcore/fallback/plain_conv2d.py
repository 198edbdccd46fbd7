"""``torch.plain.conv2d``: torch's convolution for float activations, im2col for integer activations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contracts import Conv2dRequest
from ..contracts.conv2d import Pair, check_image, convolved_size, kernel_shape, output_size
from ..discovery.kernels import Packed
from ..weights.activations import DynamicFP8, DynamicInt8, FP8Activation, StaticFP8, StaticInt8, fp8_scale, quantize_fp8
from ..weights.qtensor import contiguous
from .columns import by_pieces
from .integer import ChannelProduct, activation_bound, centred_activations, finish
from .ops import op
from .padding import float_conv2d, may_need_explicit_padding, traced_conv2d
from .plain_linear import product_dtype
from .weights import NeutralKernel, autocast_device


class PlainConv2d(NeutralKernel):
    """`conv2d` in plain torch ops; the whole weight is dequantized, because convolution weights are small."""

    def __init__(self, request: Conv2dRequest) -> None:
        super().__init__("torch.plain.conv2d", request.weight, request.n, request.k)
        self.request, self.out_dtype = request, request.out_dtype
        self.compute = product_dtype(request, self.reader)
        self.autocast = autocast_device(request.device)
        # Sizes are unknown in a graph, so an op checks them at run time; a trace cannot register it, so it is made
        # here.
        checked = request.device.type == "cpu" and may_need_explicit_padding(request)
        self._traced = op(traced_conv2d, _fake) if checked else F.conv2d

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **_runtime_params: Tensor) -> Tensor:
        """Run on x ``(B, IC, H, W)``, giving ``(B, OC, OH, OW)``; raises `FormatError` for another channel count."""
        check_image(self.name, x, self.request)
        if self.autocast and torch.is_autocast_enabled(self.autocast):
            with torch.autocast(self.autocast, enabled=False):
                return self(x, packed, bias)
        if not (self.n and self.k):
            return self._bias_only(x, bias)
        if isinstance(self.request.activation, (DynamicFP8, StaticFP8)):
            return self._fp8(self.request.activation, x, packed, bias)
        return self._float(x, packed, bias) if self.request.activation is None else self._integer(x, packed, bias)

    def _fp8(self, activation: FP8Activation, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        """Products of im2col columns, each of which is quantized like a token."""
        r, dtype = self.request, torch.float64 if x.dtype == torch.float64 else torch.float32
        factor = packed.get("global_scale")
        dense = torch.cat([self._rows(*chunk, factor, dtype) for chunk in self.reader.chunks(packed)])
        kernel = dense.view(r.groups, self.n // r.groups, self.k)

        def product(columns: Tensor) -> Tensor:
            tokens = columns.transpose(1, 2)
            scale = fp8_scale(activation, tokens)
            values = quantize_fp8(tokens, scale).to(dtype) * scale
            return self._finished(torch.matmul(kernel, values.transpose(1, 2)), bias)

        return by_pieces(x.to(dtype), r, product, max(r.groups * self.k, self.n))

    def _finished(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Results ``(OC, M)`` of products ``(groups, OC/groups, M)`` that only `finish` overwrites."""
        bias = None if bias is None else bias.unsqueeze(-1)
        return finish(y.flatten(0, 1), 1.0, bias, self.request.output, self.out_dtype, {})

    def _bias_only(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the result for a weight without elements, which torch's convolutions reject."""
        size = output_size(self.request, *x.shape[2:])
        wide = torch.float64 if self.compute == torch.float64 else torch.float32
        y = self._finished(x.new_zeros(1, self.n, x.shape[0] * math.prod(size), dtype=wide), bias)
        return y.view(self.n, x.shape[0], *size).transpose(0, 1)

    def _float(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        r = self.request
        x, fused = x.to(self.compute), bias if bias is not None and bias.dtype == self.compute else None
        call = self._traced if torch.compiler.is_compiling() else convolve
        y = call(x, self._kernel(x, packed), fused, r.stride, r.padding, r.dilation, r.groups)
        if bias is not None and fused is None:
            wide = torch.promote_types(self.compute, torch.float32)
            y = y.to(wide) + bias.to(wide).view(-1, 1, 1)
        return y.to(self.out_dtype)

    def _kernel(self, x: Tensor, packed: Packed) -> Tensor:
        """The dense weight ``(OC, IC/groups, KH, KW)``, in the memory format of x."""
        factor = packed.get("global_scale")
        dense = torch.cat([self._rows(*chunk, factor) for chunk in self.reader.chunks(packed)])
        kernel = dense.view(kernel_shape(self.request)).permute(0, 3, 1, 2)
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        return kernel if last else contiguous(kernel)

    def _rows(
        self,
        data: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        global_scale: Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        dense = self.reader.dense(data, scale, zero, dtype or self.compute, global_scale)
        return self.reader.restore_order(dense)

    def _integer(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        r, activation = self.request, self.request.activation
        assert isinstance(activation, (DynamicInt8, StaticInt8))
        weighted = ChannelProduct(self.reader, packed, r.groups, activation_bound(activation))
        column = max(r.groups * self.k, self.n * self.reader.groups)
        if isinstance(activation, StaticInt8):
            x, fixed = centred_activations(activation, x, {})
            return by_pieces(x, r, lambda columns: self._finished(weighted(columns) * fixed, bias), column)

        def product(columns: Tensor) -> Tensor:
            codes, scale = centred_activations(activation, columns.transpose(1, 2), {})
            y = weighted(codes.transpose(1, 2))
            return self._finished(y * torch.as_tensor(scale).transpose(1, 2), bias)

        return by_pieces(x.float(), r, product, column)


def convolve(
    x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    """Convolve x ``(B, IC, H, W)`` with a dense kernel ``(OC, IC/groups, KH, KW)`` of the same dtype."""
    if x.device.type == "cpu":
        return float_conv2d(x, kernel, bias, stride, padding, dilation, groups)
    # The op with allow_tf32 takes no symbolic sizes, so a graph follows torch.backends.cudnn.allow_tf32 instead.
    if x.dtype != torch.float32 or x.device.type != "cuda":
        return F.conv2d(x, kernel, bias, stride, padding, dilation, groups)
    # By default cuDNN may round float32 to TF32 (10 bits): a thousand times the error that the contract allows.
    exact = {"benchmark": False, "deterministic": False, "cudnn_enabled": True, "allow_tf32": False}
    geometry = (stride, padding, dilation, False, (0, 0), groups)
    y: Tensor = torch.ops.aten._convolution(x, kernel, bias, *geometry, **exact)  # noqa: SLF001  torch's own name
    return y


def _fake(x: Tensor, kernel: Tensor, _bias: Tensor | None, *geometry: Any) -> Tensor:
    size = convolved_size(x.shape[2:], kernel.shape[2:], *geometry[:3])
    return x.new_empty(x.shape[0], kernel.shape[0], *size)
