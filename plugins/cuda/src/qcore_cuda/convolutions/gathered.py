"""`GATHERED`: implicit GEMM on an image that is quantized once; on any device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from qcore_triton.kernels.conv import gathered

from ..runtime.device import Device
from ..runtime.launch import launch, options
from .base import ConvCall, Convolution
from .codes import image_codes


class Tile(NamedTuple):
    """**Fields:** ``bm``, ``bn``: output positions and channels of a tile; ``warps``; ``stages``."""

    bm: int
    bn: int
    warps: int
    stages: int


class Gathered(Convolution[Tile]):
    """See `qcore_triton.kernels.conv.gathered`."""

    name: ClassVar[str] = "gathered"

    def serves(self, device: Device, call: ConvCall) -> bool:
        del device
        return call.per_channel and call.one_scale

    def candidates(self, device: Device, call: ConvCall) -> Iterator[Tile]:
        height, width = call.size
        yield _tile(call.x.shape[0] * height * width, call.weight.n, device)

    def launch(self, call: ConvCall, device: Device, config: Tile) -> Tensor:
        x, weight, geometry, (oh, ow), n = call.x, call.weight, call.geometry, call.size, call.weight.n
        m, channels = x.shape[0] * oh * ow, x.shape[1]
        q = image_codes(x, geometry, call.activation, device)
        y = torch.empty((m, n), dtype=call.result.dtype, device=x.device)
        bk = next(size for size in (128, 64, 32) if channels % size == 0)
        launch(
            gathered, (-(-m // config.bm) * -(-n // config.bn),),
            q, weight.data, weight.scale, call.sums, y if call.bias is None else call.bias, y,
            float(call.activation.scale or 1.0), float(call.activation.zero),
            float(call.result.scale or 1.0), float(call.result.zero),
            m, n, channels // 32, weight.data.shape[1] // 32, oh, ow, q.shape[1], q.shape[2],
            *geometry.stride, *geometry.dilation, geometry.kernel[1], geometry.kernel[0] * geometry.kernel[1],
            BK=bk, BN=config.bn, BM=config.bm, STAGES=config.stages, GROUP_M=8, HAS_BIAS=call.bias is not None,
            OUT=0 if call.result.scale is None else 1, ALIGNED=n % 16 == 0, **options(device, config.warps),
        )  # fmt: skip
        return y


def _tile(m: int, n: int, device: Device) -> Tile:
    """The largest tile that still gives every multiprocessor a tile."""
    if device.arch == 0 or device.arch < 80:
        return Tile(64, 64, 4, 2)
    if n > 128 and n % 16 == 0 and -(-m // 128) * -(-n // 256) >= device.sms:
        return Tile(128, 256, 8, 4) if device.arch in {100, 103} else Tile(128, 128, 4 if device.arch == 90 else 8, 3)
    if n > 64 and -(-m // 128) * -(-n // 128) >= device.sms:
        return Tile(128, 128, 8, 3)
    return Tile(128, 64, 4, 3) if n > 32 else Tile(128, 32, 4, 3)


GATHERED = Gathered()
