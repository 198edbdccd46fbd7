"""Convolutions of float images: a lane computes some pixels of some output channels, without columns in memory."""

from __future__ import annotations

import math

import torch

from ..builder import Builder, fold
from ..device import Device
from .batch_norm import Norm, vector
from .convolution import Geometry2d
from .operand import Operand, new
from .pointwise import convert
from .prepare import LANES

_CHUNK = 16
"""Products that are summed before the sum is added to the total."""
_CORES = 32
"""Assumed if the driver does not report a number."""


def convolution(
    b: Builder, x: Operand, weight: Operand, bias: Operand | None, geometry: Geometry2d, norm: Norm | None = None
) -> Operand:
    """``(N, OC, OH, OW)`` float32 from x ``(N, IC, H, W)`` and weight ``(OC, IC/groups, KH, KW)``, as torch's conv2d.

    x may have any strides; the bias is ``(OC,)``. A weight that is not contiguous is copied. ``norm``: of the result.
    """
    batch, _, height, width = x.shape
    total, channels, *kernel = weight.shape
    y = new(b, (batch, total, *geometry.output(height, width)), torch.float32)
    if y.numel == 0:
        return y
    weight = weight if weight.is_contiguous else convert(b, weight, weight.dtype)
    groups, pixels = geometry.groups, y.numel // total
    columns = total // groups
    lanes, tm, tn = _tile(b.device, pixels, columns, groups)
    tiles, blocks = -(-pixels // (lanes * tm)), -(-columns // tn)
    _, *steps = geometry.words
    push: list[int | float] = [
        tiles,
        blocks,
        groups,
        pixels,
        *y.shape[2:],
        height,
        width,
        *kernel,
        *steps,
        channels,
        columns,
    ]
    push += [max(1, _CHUNK // math.prod(kernel)), *x.strides, *y.strides]
    push += [x.offset, weight.offset, 0.0 if norm is None else norm.eps]
    norms = [x.ref] * 4 if norm is None else norm.refs(b)
    refs = [x.ref, weight.ref, x.ref if bias is None else vector(b, bias).ref, *norms, y.ref]
    constants = (lanes, tm, tn, int(bias is not None), *[0] * 6, 0 if norm is None else norm.number)
    b.dispatch("conv_float", constants, fold(tiles * blocks * groups), push, refs)
    return y


def _tile(device: Device, pixels: int, columns: int, groups: int) -> tuple[int, int, int]:
    """Lanes of a workgroup, and pixels and output channels of a lane: the largest whose workgroups fill the device."""
    if device.profile == "cpu":
        return 8, 4 if pixels > 16 else 1, min(4, columns)
    wanted = 2 * (device.description.limits.cores or _CORES)
    for tm, tn in ((4, 8), (2, 8), (2, 4), (1, 4)):
        if -(-pixels // (LANES * tm)) * -(-columns // tn) * groups >= wanted:
            break
    return LANES, tm, min(tn, columns)
