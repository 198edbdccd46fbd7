"""The kernel of the contract ``conv2d``: ``cpu.conv2d``."""

from __future__ import annotations

import torch
from torch import Tensor

from qcore import Conv2dRequest, QTensor
from qcore.plugin_api import (
    Kernel,
    Packed,
    check_image,
    check_weight,
    given_numbers,
    laid_out_like,
    output_size,
)

from . import native, ops
from .eligibility import takes_channels, takes_planes_first, takes_windows_last
from .kinds import Mode, needs_sums
from .layout import WeightLayout
from .parameters import readable_bias


class CpuConv2d(Kernel):
    """Receptive fields become rows of int8 in the cache; images are channels last, or planes if these are few.

    Packed: as `WeightLayout`, with the channel groups concatenated.
    """

    name = "cpu.conv2d"

    def __init__(self, request: Conv2dRequest) -> None:
        self.request, self.format, self.n, self.k = request, request.weight, request.n, request.k
        self.out_dtype = request.out_dtype
        self.parts = self.parts_of(request)
        self.planes_first, self.channelwise = takes_planes_first(request), takes_channels(request)
        self.windows_last = takes_windows_last(request)
        self.turned = self.channelwise and request.activation is not None
        self.rows = self.n // self.parts
        self.layout = WeightLayout(self.format, self.rows, self.k, sums=needs_sums(request.activation))
        scale, zero = given_numbers(request.activation)
        out_scale, out_zero = given_numbers(request.output)
        sides = (request.kernel_size, request.stride, request.padding, request.dilation)
        self._constants = (
            request.in_channels, self.n, request.groups, *self.layout.numbers[2:], int(Mode.of(request.activation)),
            self.layout.divides, scale or 1.0, zero, out_scale or 1.0, out_zero, ops.TYPES[self.out_dtype],
            *(size for side in sides for size in side),
        )  # fmt: skip

    @staticmethod
    def parts_of(request: Conv2dRequest) -> int:
        """How many parts of the weight are packed one after the other."""
        return request.groups

    @property
    def packing(self) -> str:
        """Two layouts for each number of parts: with and without the sums that zero points of x need."""
        return f"{self.name}.{self.parts}{'.sums' if self.layout.sums else ''}"

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Raises `FormatError` unless the weight has the format and shape the kernel was made for."""
        check_weight(self.name, weight, self.format, self.n, self.k)
        parts = [self.layout.pack(weight.narrow(0, g * self.rows, self.rows)) for g in range(self.parts)]
        shared = ("table", "global_scale")
        return native.settled(
            {name: parts[0][name] if name in shared else torch.cat([part[name] for part in parts]) for name in parts[0]}
        )

    def unpack(self, packed: Packed) -> QTensor:
        shared = {name: t for name, t in packed.items() if name in ("table", "global_scale")}
        cut = {name: t.chunk(self.parts) for name, t in packed.items() if name not in shared}
        parts = [self.layout.unpack({**{name: t[g] for name, t in cut.items()}, **shared}) for g in range(self.parts)]
        return parts[0] if self.parts == 1 else QTensor.cat(parts)

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        """Images x ``(B, IC, H, W)`` to ``(B, OC, OH, OW)`` in the memory format of x; raises `FormatError`."""
        del given  # no parameters per token
        check_image(self.name, x, self.request)
        if not torch.compiler.is_compiling() and not x.numel():
            size = (x.shape[0], self.n, *output_size(self.request, *x.shape[2:]))
            return x.new_zeros(size, dtype=self.out_dtype)
        return self.convolved(x, self.layout.arguments(packed), readable_bias(bias))

    def convolved(self, x: Tensor, weight: tuple[Tensor | None, ...], bias: Tensor | None) -> Tensor:
        """The result for images of the right shape that are not empty."""
        if self.planes_first and _is_quick(x):  # one part is packed alike for both
            planes: Tensor = ops.conv2d_planes(x, *weight, bias, *self._constants)
            return planes
        y = ops.conv2d(_channels_last(x), *weight, bias, *self._constants)
        return _channels_first(y) if _is_quick(x) and y.dtype in _QUICK else laid_out_like(y.permute(0, 3, 1, 2), x)


class CpuPlaneConv2d(CpuConv2d):
    """The same for few channels in a group: images are read as planes, in torch's default format.

    Depthwise and with small channel groups, channels that lie last are lanes. Of one group, images whose channels lie
    last have windows where that is faster; so have others, turned round, where windows are long.

    Packed: as `WeightLayout`, whatever the groups: each row stands for itself.
    """

    @staticmethod
    def parts_of(request: Conv2dRequest) -> int:
        """One: rows of all groups are packed side by side."""
        del request
        return 1

    def convolved(self, x: Tensor, weight: tuple[Tensor | None, ...], bias: Tensor | None) -> Tensor:
        last = x.is_contiguous(memory_format=torch.channels_last)
        if self.channelwise and x.stride(1) == 1 and last:
            pixels: Tensor = ops.conv2d_channels(x.permute(0, 2, 3, 1).contiguous(), *weight, bias, *self._constants)
            return pixels.permute(0, 3, 1, 2)
        if self.turned and _is_quick(x) and x.nbytes <= _MOST_TURNED:
            y = ops.conv2d_channels(_channels_last(x), *weight, bias, *self._constants)
            return _channels_first(y) if y.dtype in _QUICK else laid_out_like(y.permute(0, 3, 1, 2), x)
        if self.windows_last and (last or not self.planes_first):
            return super().convolved(x, weight, bias)
        quick = _is_quick(x, last=True)
        planes = _channels_first(x.permute(0, 2, 3, 1)) if quick else x.contiguous()
        y = ops.conv2d_planes(planes, *weight, bias, *self._constants)
        return _channels_last(y).permute(0, 3, 1, 2) if quick and y.dtype in _QUICK else laid_out_like(y, x)


_MOST_TURNED = 4 << 20
"""Bytes of images, up to which those of small channel groups are turned round: what large copies cost is more than is
gained (benchmarks/results/2026-11-28-cpu-asymmetric-convolutions.md)."""
_QUICK = (torch.float32, torch.bfloat16, torch.float16)


def _channels_last(x: Tensor) -> Tensor:
    """Images x as ``(B, H, W, IC)``, contiguous."""
    if not _is_quick(x):
        return x.permute(0, 2, 3, 1).contiguous()
    batch, channels, *size = x.shape
    pixels: Tensor = ops.transposed(x.flatten(2))
    return pixels.view(batch, *size, channels)


def _channels_first(x: Tensor) -> Tensor:
    """Images ``(B, H, W, C)``, contiguous, as ``(B, C, H, W)``, contiguous."""
    planes: Tensor = ops.transposed(x.flatten(1, 2))
    return planes.view(x.shape[0], x.shape[3], *x.shape[1:3])


def _is_quick(x: Tensor, *, last: bool = False) -> bool:
    """Whether images have their channels first (or ``last``), and `ops.transposed` may copy them.

    Torch takes 2 to 12 times as long. Not in a graph, whose compiler fuses copies.
    """
    formats = (torch.contiguous_format, torch.channels_last)
    own, other = (x.is_contiguous(memory_format=form) for form in (formats[::-1] if last else formats))
    return x.dtype in _QUICK and own and not other and not torch.compiler.is_compiling() and not x.is_neg()
