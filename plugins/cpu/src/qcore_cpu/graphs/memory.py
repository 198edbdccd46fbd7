"""Memory of a program: values as views of bases, and the arena that temporary ones share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .steps import NOWHERE, TYPES, Place

ARENA = 0
"""The slot of the arena."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class Value:
    """A tensor of a program: bytes from ``offset`` of base number ``slot`` on, viewed as ``meta`` views its storage."""

    slot: int
    offset: int
    meta: Tensor

    @property
    def place(self) -> Place:
        """Where its first element lies."""
        start = self.offset + self.meta.storage_offset() * self.meta.itemsize
        return Place(self.slot, TYPES.get(self.meta.dtype, 0), start)

    def viewed(self, meta: Tensor) -> Value:
        """Another view of the same memory."""
        return Value(self.slot, self.offset, meta)


def place_of(value: Value | None) -> Place:
    """The place of a value; nowhere for None."""
    return NOWHERE if value is None else value.place


def meta(shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
    """A tensor without memory, contiguous by default."""
    if strides is None:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")


def collapsed(sizes: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Fewest dimensions that give the same elements in the same order: sizes, and the strides of each operand."""
    kept: list[int] = []
    found: list[list[int]] = [[] for _ in strides]
    for at, size in enumerate(sizes):
        if size == 1:
            continue
        if kept and all(own[-1] == one[at] * size for own, one in zip(found, strides, strict=True)):
            kept[-1] *= size
            for own, one in zip(found, strides, strict=True):
                own[-1] = one[at]
        else:
            kept.append(size)
            for own, one in zip(found, strides, strict=True):
                own.append(one[at])
    return (kept, found) if kept else ([1], [[0] for _ in strides])


class Arena:
    """Ranges of one buffer, given again once they are free: steps run one after the other."""

    def __init__(self) -> None:
        self.bytes = 0
        self._holes: list[tuple[int, int]] = []  # offset, size; none adjacent

    def take(self, size: int) -> tuple[int, int]:
        """A range of at least ``size`` bytes: offset and size."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        fitting = min(((room, at) for at, room in self._holes if room >= size), default=None)
        if fitting is None:
            offset, self.bytes = self.bytes, self.bytes + size
            return offset, size
        room, at = fitting
        self._holes.remove((at, room))
        if room > size:
            self._holes.append((at + size, room - size))
        return at, size

    def free(self, offset: int, size: int) -> None:
        """Give a range back."""
        joined: list[tuple[int, int]] = []
        for at, room in sorted([*self._holes, (offset, size)]):
            if joined and sum(joined[-1]) == at:
                joined[-1] = joined[-1][0], joined[-1][1] + room
            else:
                joined.append((at, room))
        self._holes = joined


def is_same_view(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, in the same memory, are the same numbers in the same order."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
    )


def view_of(memory: Tensor, value: Value) -> Tensor:
    """A value as a tensor: ``memory`` is that of its base, uint8 for the arena."""
    own: Any = value.meta
    if value.slot == ARENA:
        memory = memory[value.offset : value.offset + own.untyped_storage().nbytes()]
    if memory.dtype != own.dtype:  # for elements of another size the last dimension has to be a multiple of them
        memory = (memory.view(-1) if memory.is_contiguous() else memory).view(own.dtype)
    return memory.as_strided(own.shape, own.stride(), own.storage_offset() + memory.storage_offset())
