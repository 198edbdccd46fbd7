"""The kernels of the contract ``conv2d``: ``xpu.conv2d_w4a16``, ``..._w8a16``, ``..._w4a8``, ``..._w8a8``.

In narrow channel groups also ``xpu.conv2d_groups_w4a8`` and ``..._w8a8``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from qcore import Conv2dRequest
from qcore.plugin_api import Packed, runs_now
from qcore_triton.channel_groups import ChannelGroupsConv2d, on_matrix_units, takes_channel_groups
from qcore_triton.codes import numbers_of
from qcore_triton.conv2d import PackedConv2d, why_not_int8

from . import device, triton_ops
from .triton_linear import why_not_weight

_LARGEST_COLUMN = 1 << 14
"""Values that one program quantizes: 512 for each of 32 sub-groups, the most that a work-group may have."""


class DenseConv2d(PackedConv2d):
    """Float activations: dequantized for torch's convolution, or its product for 1 x 1 kernels."""

    note = (
        "Triton dequantizes the weight for torch's convolution: this saves memory, but on small images is slower than "
        "the unquantized layer."
    )

    def __init__(self, request: Conv2dRequest) -> None:
        super().__init__("xpu", request, 16)

    def convolve(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        call: Callable[..., Tensor] = triton_ops.conv2d_dense if runs_now(x) else triton_ops.op_conv2d_dense
        weight = (packed["data"], packed["scale"], packed.get("zero"))
        return call(x, *weight, bias, *self.sizes, *self.geometry, self.out_dtype)

    def multiply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        call: Callable[..., Tensor] = triton_ops.linear_dense if runs_now(x) else triton_ops.op_linear_dense
        return call(x, packed["data"], packed["scale"], packed.get("zero"), bias, *self.sizes, self.out_dtype)


class Int8Conv2d(PackedConv2d):
    """Int8 activations, per column or given for the whole tensor: exact int32 sums, the rest in float32."""

    note = "Triton quantizes columns and multiplies int8 codes on DPAS. Not tuned: no such GPU was available."

    def __init__(self, request: Conv2dRequest) -> None:
        numbers = numbers_of(request.activation, request.output)
        super().__init__("xpu", request, 8, sums=not numbers[0])
        self._constants = (*numbers, self.out_dtype)

    def convolve(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        call: Callable[..., Tensor] = triton_ops.conv2d_a8 if runs_now(x) else triton_ops.op_conv2d_a8
        weight = (packed["data"], packed["scale"], packed.get("zero"), packed.get("sums"))
        return call(x, *weight, bias, *self.sizes, *self.geometry, *self._constants)

    def multiply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        call: Callable[..., Tensor] = triton_ops.linear_a8 if runs_now(x) else triton_ops.op_linear_a8
        weight = (packed["data"], packed["scale"], packed.get("zero"), packed.get("sums"))
        return call(x, *weight, bias, None, None, None, None, *self.sizes, *self._constants)


class GroupsConv2d(ChannelGroupsConv2d):
    """Int8 activations in narrow channel groups: one launch for all of them."""

    note = "Triton convolves all channel groups in one launch. Not tuned: no such GPU was available."

    def __init__(self, request: Conv2dRequest) -> None:
        super().__init__("xpu", request)

    def convolve(self, x: Tensor, *arguments: Any) -> Tensor:
        call: Callable[..., Tensor] = triton_ops.conv2d_groups_a8 if runs_now(x) else triton_ops.op_conv2d_groups_a8
        return call(x, *arguments)


def why_not(request: Conv2dRequest) -> str:
    """Why a request that `eligibility` accepts has no kernel here; empty if it has one."""
    if (reason := why_not_weight(request)) or request.activation is None:
        return reason
    if takes_channel_groups(request):
        products = on_matrix_units(request.k, request.n // request.groups)
        return device.why_not_int8(request.device) if products else ""
    return device.why_not_int8(request.device) or why_not_int8(request, _LARGEST_COLUMN)


def kernel(request: Conv2dRequest) -> DenseConv2d | Int8Conv2d | GroupsConv2d:
    """The kernel for a request that `why_not` accepts."""
    if request.activation is None:
        return DenseConv2d(request)
    return GroupsConv2d(request) if takes_channel_groups(request) else Int8Conv2d(request)
