"""Convolutions whose channel groups have few output channels: each result separately, without storing columns."""

from __future__ import annotations

import torch

from ..builder import Builder, Ref, fold
from ..device import Buffer
from ..layout import ROWS, DeviceWeight
from .prepare import LANES, Activation, Source, mode_of
from .rows import NUMBERS, Rows


def is_direct(weight: DeviceWeight, heads: int) -> bool:
    """Whether a tile would be mostly empty: tiles compute at least eight output channels of a group."""
    return heads > 1 and weight.geometry.n // heads < ROWS and len(weight.parts) == 1


def convolve(
    b: Builder, source: Source, weight: DeviceWeight, bias: Buffer | None, activation: Activation | None, out: Rows
) -> None:
    """The convolution into ``out``, float32, float16 or bfloat16."""
    g, part = weight.geometry, weight.parts[0]
    groups = fold(-(-out.rows * g.n // LANES))
    mode, scale, zero = (0, 1.0, 0) if activation is None else mode_of(activation)
    push = source.push(g, groups[0], mode, scale, zero)
    push += [g.n, part.padded_n, out.pitch, NUMBERS[out.dtype], g.zero_kind, int(bias is not None)]
    zeros = part.scale if part.zero is None else part.zero
    weights: list[Ref | Buffer | None] = [part.codes, part.scale, zeros, part.values, None]
    refs = [source.x.ref, *weights, part.scale if bias is None else bias, out.ref]
    form = (int(activation is not None), int(out.dtype == torch.float32))
    constants = (LANES, *source.constants(g), g.bits, *form, g.values)
    b.dispatch("conv_direct", constants, groups, push, refs)
