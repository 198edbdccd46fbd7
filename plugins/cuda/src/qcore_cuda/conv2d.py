"""The kernels of the contract ``conv2d``: ``cuda.conv2d_w4a16``, ``..._w8a16``, ``..._w4a8``, ``..._w8a8``."""

from __future__ import annotations

from torch import Tensor

from qcore import Conv2dRequest
from qcore.contracts.conv2d import check_image
from qcore.kernels import Kernel, Packed

from . import conv_ops, ops
from .linear import constants
from .portable.geometry import LARGEST_COLUMN, column_size
from .portable.packing import PackedKernel

_MOST_GROUPS = 32
"""Channel groups run one after another."""


class CudaConv2d(PackedKernel):
    """What the convolutions share: a 1 x 1 kernel without padding and groups is `linear` over pixels."""

    def __init__(self, request: Conv2dRequest, activations: int, *, sums: bool = False) -> None:
        name = f"cuda.conv2d_w{request.weight.bits}a{activations}"
        super().__init__(name, request.weight, request.n, request.k, sums=sums)
        r = self.request = request
        self.out_dtype = request.out_dtype
        self.geometry = (list(r.kernel_size), list(r.stride), list(r.padding), list(r.dilation), r.groups)
        self.pointwise = r.kernel_size == (1, 1) and r.padding == (0, 0) and r.groups == 1

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **_given: Tensor) -> Tensor:
        """Run on x ``(B, IC, H, W)``, giving ``(B, OC, OH, OW)``; raises `FormatError` for another channel count."""
        check_image(self.name, x, self.request)
        if not self.pointwise:
            return self.convolve(x, packed, bias)
        sh, sw = self.request.stride
        pixels = x[:, :, ::sh, ::sw].movedim(1, -1)
        y = self.multiply(pixels.reshape(-1, self.k), packed, bias)
        return y.view(*pixels.shape[:-1], self.n).movedim(-1, 1)

    def convolve(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        """The convolution of x ``(B, IC, H, W)``."""
        raise NotImplementedError

    def multiply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        """The product of pixels x ``(M, IC)`` with the weight."""
        raise NotImplementedError


class FloatConv2d(CudaConv2d):
    """Float activations: dequantized for cuDNN, or the weight-only product for 1 x 1 kernels."""

    def __init__(self, request: Conv2dRequest) -> None:
        super().__init__(request, 16)

    def convolve(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        return conv_ops.op_conv2d_a16(  # type: ignore[no-any-return]
            x, packed["data"], packed["scale"], packed.get("zero"), bias, *self.sizes, *self.geometry, self.out_dtype
        )

    def multiply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        return ops.op_linear_a16(  # type: ignore[no-any-return]
            x, packed["data"], packed["scale"], packed.get("zero"), bias, *self.sizes, self.out_dtype
        )


class Int8Conv2d(CudaConv2d):
    """Int8 activations, per column or given for the whole tensor: exact int32 sums, the rest in float32."""

    def __init__(self, request: Conv2dRequest) -> None:
        activation, output = request.activation, request.output
        assert activation is not None  # `kernel` has looked
        quantization = constants(activation, output)
        super().__init__(request, 8, sums=not quantization[0])
        self._constants = (*quantization, self.out_dtype)

    def convolve(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        weight = (packed["data"], packed["scale"], packed.get("zero"), packed.get("sums"))
        return conv_ops.op_conv2d_a8(  # type: ignore[no-any-return]
            x, *weight, bias, *self.sizes, *self.geometry, *self._constants
        )

    def multiply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        weight = (packed["data"], packed["scale"], packed.get("zero"), packed.get("sums"))
        return ops.op_linear_a8(  # type: ignore[no-any-return]
            x, *weight, bias, None, None, None, None, *self.sizes, *self._constants
        )


def kernel(request: Conv2dRequest) -> Kernel | str:
    """The kernel for a request that `eligibility` has nothing against, or why there is none."""
    if request.activation is None:
        return FloatConv2d(request)
    r = request
    each = r.n // r.groups
    if r.groups > 1 and (each % 16 or r.groups > _MOST_GROUPS):
        return (
            f"int8 convolutions in {r.groups} channel groups of {each} output channels run on torch ops: "
            f"here groups are multiples of 16 output channels, at most {_MOST_GROUPS} of them."
        )
    taps, channels = r.kernel_size[0] * r.kernel_size[1], r.in_channels // r.groups
    if column_size(taps, channels) > LARGEST_COLUMN:
        return (
            f"a column of {taps} x {channels} values is too long to be quantized in one program, which holds "
            f"{LARGEST_COLUMN}; torch ops serve it."
        )
    return Int8Conv2d(request)
