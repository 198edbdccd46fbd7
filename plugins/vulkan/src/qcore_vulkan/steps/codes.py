"""Int8 codes of activations, as strided words: from floats and back."""

from __future__ import annotations

import torch

from qcore import OutputInt8, StaticInt8

from ..builder import Builder, fold
from .operand import Operand, result
from .prepare import LANES
from .walks import walk

_ENCODE, _DECODE = 0, 1


def encode(b: Builder, x: Operand, given: StaticInt8 | OutputInt8) -> Operand:
    """``clamp(round(x / scale) + zero_point, -128, 127)`` of float32 x, as int32; half to even."""
    return _launch(b, _ENCODE, x, result(b, x.shape, torch.int32, None, x), given)


def decode(b: Builder, x: Operand, given: StaticInt8 | OutputInt8) -> Operand:
    """``(x - zero_point) * scale`` of int32 codes, as float32."""
    return _launch(b, _DECODE, x, result(b, x.shape, torch.float32, None, x), given)


def _launch(b: Builder, function: int, x: Operand, y: Operand, given: StaticInt8 | OutputInt8) -> Operand:
    if y.numel == 0:
        return y
    plan = walk(y.shape, y.strides, x.strides)
    modes = (plan.mode(0, y.offset), plan.mode(1, x.offset), 0, 0)
    scale = 1.0 if given.scale is None else given.scale
    push = [*plan.push(), y.offset, x.offset, scale, given.zero_point]
    constants = (LANES, len(plan.sizes), plan.width, function, 0, *modes, 0)
    b.dispatch("codes", constants, fold(-(-plan.lanes // LANES)), push, [x.ref, *[None] * 6, y.ref])
    return y
