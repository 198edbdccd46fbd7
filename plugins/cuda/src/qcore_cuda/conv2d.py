"""The kernels of the contract ``conv2d``: ``cuda.conv2d_w4a16``, ``..._w8a16``, ``..._w4a8``, ``..._w8a8``.

In narrow channel groups also ``cuda.conv2d_groups_w4a8`` and ``..._w8a8``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qcore import Conv2dRequest
from qcore.plugin_api import Kernel, Packed
from qcore_triton.channel_groups import ChannelGroupsConv2d, takes_channel_groups
from qcore_triton.codes import numbers_of
from qcore_triton.conv2d import PackedConv2d, why_not_int8

from . import conv_ops, ops

_LARGEST_COLUMN = 1 << 15
"""The largest `column_size`, in values: a column stays in the registers of one program."""


class FloatConv2d(PackedConv2d):
    """Float activations: dequantized for cuDNN, or the weight-only product for 1 x 1 kernels."""

    def __init__(self, request: Conv2dRequest) -> None:
        super().__init__("cuda", request, 16)

    def convolve(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        parts = packed["data"], packed["scale"], packed.get("zero"), bias, packed.get("factor")
        return conv_ops.op_conv2d_a16(  # type: ignore[no-any-return]
            x, *parts, *self.sizes, *self.geometry, self.element, self.out_dtype
        )

    def multiply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        parts = packed["data"], packed["scale"], packed.get("zero"), bias, packed.get("factor")
        return ops.op_linear_a16(  # type: ignore[no-any-return]
            x, *parts, *self.sizes, self.element, self.out_dtype
        )


class Int8Conv2d(PackedConv2d):
    """Int8 activations, per column or given for the whole tensor: exact int32 sums, the rest in float32."""

    def __init__(self, request: Conv2dRequest) -> None:
        quantization = numbers_of(request.activation, request.output)
        super().__init__("cuda", request, 8, sums=not quantization[0])
        self._constants = (*quantization, self.out_dtype)

    def convolve(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        weight = (packed["data"], packed["scale"], packed.get("zero"), packed.get("sums"))
        return conv_ops.op_conv2d_a8(  # type: ignore[no-any-return]
            x, *weight, bias, *self.sizes, *self.geometry, *self._constants
        )

    def multiply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        weight = (packed["data"], packed["scale"], packed.get("zero"), packed.get("sums"))
        return ops.op_linear_a8(  # type: ignore[no-any-return]
            x, *weight, None, bias, None, None, None, None, *self.sizes, *self._constants
        )


class GroupsConv2d(ChannelGroupsConv2d):
    """Int8 activations in narrow channel groups: one launch for all of them."""

    def __init__(self, request: Conv2dRequest) -> None:
        super().__init__("cuda", request)

    def convolve(self, x: Tensor, *arguments: Any) -> Tensor:
        return conv_ops.op_conv2d_groups_a8(x, *arguments)  # type: ignore[no-any-return]


def why_not(request: Conv2dRequest) -> str:
    """Why a convolution that `eligibility` accepts is refused; empty if it is supported."""
    if request.activation is None or takes_channel_groups(request):
        return ""
    return why_not_int8(request, _LARGEST_COLUMN)


def kernel(request: Conv2dRequest) -> Kernel:
    """The kernel for a request that `eligibility` and `why_not` accept."""
    if request.activation is None:
        return FloatConv2d(request)
    return GroupsConv2d(request) if takes_channel_groups(request) else Int8Conv2d(request)
