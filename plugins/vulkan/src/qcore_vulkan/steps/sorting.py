"""Rows in order."""

from __future__ import annotations

import math

import torch

from ..builder import Builder, Ref, fold
from ..device import Device
from .operand import WORDS, Operand, merge, new
from .pointwise import convert

_SORT, _EXCHANGE, _MERGE = range(3)
_MOST_OUTER = 4
_BLOCK = 2048
"""Elements that fit the shared memory of every device, 8 bytes each."""


def sort(b: Builder, x: Operand, largest: bool = False) -> tuple[Operand, Operand]:
    """The elements of rows from the smallest, or the largest on, and their int32 places; both are new.

    Stable: of equal elements the first comes first. NaN is the largest.
    """
    *outer, count = x.shape
    values, indices = new(b, x.shape, x.dtype), new(b, x.shape, torch.int32)
    if values.numel == 0:
        return values, indices
    sizes, (strides,) = merge(outer, x.strides[:-1])
    if len(sizes) > _MOST_OUTER:
        return sort(b, convert(b, x, x.dtype), largest)
    padded = max(2, 1 << (count - 1).bit_length())
    block = min(padded, _BLOCK)
    rows = math.prod(sizes)
    pairs = indices.ref if padded == block else b.scratch(8 * rows * padded)
    given = (len(sizes), WORDS[x.dtype], int(largest), block)
    refs: list[Ref | None] = [x.ref, *[None] * 4, pairs, indices.ref, values.ref]

    def step(number: int, run: int, reach: int, last: bool) -> None:
        push = [rows, count, padded, run, reach, *_padded(sizes), *_padded(strides), x.strides[-1], x.offset]
        constants = (_lanes(b.device, block), *given, number, int(last))
        b.dispatch("sort", constants, fold(rows * (padded // block)), push, refs)

    step(_SORT, block, 0, padded == block)
    run = 2 * block
    while run <= padded:
        reach = run // 2
        while reach >= block:
            step(_EXCHANGE, run, reach, last=False)
            reach //= 2
        step(_MERGE, run, 0, run == padded)
        run *= 2
    return values, indices


def _lanes(device: Device, block: int) -> int:
    most = 32 if device.profile == "cpu" else min(512, device.description.limits.max_invocations)
    return max(1, min(1 << most.bit_length() - 1, block // 2))


def _padded(values: list[int]) -> list[int]:
    return [*values, *[0] * (_MOST_OUTER - len(values))]
