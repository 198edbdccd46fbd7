"""The base class of convolutions on packed weights, and the refusals of those with int8 activations."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from qcore import Conv2dRequest
from qcore.plugin_api import Packed, check_image

from .geometry import column_size
from .packing import PackedKernel
from .weights import ROWS

_MOST_GROUPS = 32
"""Most channel groups: they run one after another."""


class PackedConv2d(PackedKernel):
    """Convolutions: a 1 x 1 kernel without padding and groups is a product of pixels.

    ``name``: of the plugin; ``activations``: 8 or 16 bits.
    """

    def __init__(self, name: str, request: Conv2dRequest, activations: int, *, sums: bool = False) -> None:
        element = request.weight.element
        name = f"{name}.conv2d_w{element.bits if element.is_integer else element.name}a{activations}"
        super().__init__(name, request.weight, request.n, request.k, sums=sums)
        r = self.request = request
        self.out_dtype = request.out_dtype
        self.geometry = (list(r.kernel_size), list(r.stride), list(r.padding), list(r.dilation), r.groups)
        self.pointwise = _is_pointwise(request)

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **_given: Tensor) -> Tensor:
        """Run on x ``(B, IC, H, W)``, giving ``(B, OC, OH, OW)``; raises `FormatError` for a wrong channel count."""
        check_image(self.name, x, self.request)
        if not self.pointwise:
            return self.convolve(x, packed, bias)
        sh, sw = self.request.stride
        pixels = x[:, :, ::sh, ::sw].movedim(1, -1)
        y = self.multiply(pixels.reshape(-1, self.k), packed, bias)
        return y.view(*pixels.shape[:-1], self.n).movedim(-1, 1)

    @abstractmethod
    def convolve(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        """The convolution of x ``(B, IC, H, W)``."""

    @abstractmethod
    def multiply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        """The product of pixels x ``(M, IC)`` with the weight."""


def _is_pointwise(r: Conv2dRequest) -> bool:
    return r.kernel_size == (1, 1) and r.padding == (0, 0) and r.groups == 1


def why_not_int8(r: Conv2dRequest, largest: int) -> str:
    """Why a convolution with int8 activations is refused if a program holds at most ``largest`` values; else empty."""
    each = r.n // r.groups
    if r.groups > 1 and (each % ROWS or r.groups > _MOST_GROUPS):
        return (
            f"int8 convolutions in {r.groups} channel groups of {each} output channels run on torch ops: "
            f"this kernel needs a multiple of {ROWS} output channels per group, and at most {_MOST_GROUPS} groups."
        )
    taps, channels = r.kernel_size[0] * r.kernel_size[1], r.in_channels // r.groups
    if not _is_pointwise(r) and column_size(taps, channels) > largest:
        return (
            f"a column of {taps} x {channels} values is too long to be quantized in one program, which holds "
            f"{largest}; torch ops run this layer."
        )
    return ""
