"""Strided tensors on a device, as the steps of whole models pass them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..builder import Builder, Ref

MOST_DIMS = 6
"""Dimensions that a shader walks, after those that lie evenly in every operand are merged."""

WORDS = {torch.float32: 0, torch.int32: 1, torch.bool: 2}
"""Element types of one 32-bit word, as numbered in the shaders; a bool is an int32, 0 or 1."""
HALVES = {torch.float16: 1, torch.bfloat16: 2}
"""16-bit element types, of constant operands only, as numbered in the shaders."""


@dataclass(frozen=True)
class Operand:
    """A tensor on a device: memory, and where in it each element lies.

    **Fields:** ``ref``: the memory, aligned for a binding; ``shape``; ``strides`` in elements, at least 0, and 0 along
    expanded dimensions; ``dtype``: one of `WORDS`, or of `HALVES`; ``offset`` of the first element, in elements.
    """

    ref: Ref
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element on the device."""
        return 2 if self.dtype in HALVES else 4

    @property
    def is_contiguous(self) -> bool:
        """Whether elements are adjacent in row-major order."""
        expected = contiguous_strides(self.shape)
        return all(size == 1 or a == b for size, a, b in zip(self.shape, self.strides, expected, strict=True))

    def permute(self, dims: Sequence[int]) -> Operand:
        """The view whose dimension i is this one's ``dims[i]``."""
        shape, strides = (tuple(values[dim] for dim in dims) for values in (self.shape, self.strides))
        return replace(self, shape=shape, strides=strides)

    def transpose(self, first: int, second: int) -> Operand:
        """The view with two dimensions exchanged."""
        dims = list(range(len(self.shape)))
        dims[first], dims[second] = dims[second], dims[first]
        return self.permute(dims)

    def broadcast_to(self, shape: Sequence[int]) -> Operand:
        """The view of a larger shape, by torch's rules. Raises ValueError if the shapes do not fit."""
        missing = len(shape) - len(self.shape)
        sizes, strides = (1,) * missing + self.shape, (0,) * missing + self.strides
        if missing < 0 or any(a not in (1, b) for a, b in zip(sizes, shape, strict=True)):
            raise ValueError(f"an operand of shape {self.shape} cannot be broadcast to {tuple(shape)}")
        kept = tuple(
            0 if size == 1 and wanted != 1 else stride
            for size, wanted, stride in zip(sizes, shape, strides, strict=True)
        )
        return replace(self, shape=tuple(shape), strides=kept)

    def slice(self, dim: int, start: int, size: int, step: int = 1) -> Operand:
        """The view of ``size`` elements along ``dim``, from ``start`` on, ``step`` apart."""
        shape, strides = list(self.shape), list(self.strides)
        offset = self.offset + start * strides[dim]
        shape[dim], strides[dim] = size, strides[dim] * step
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset)

    def unsqueeze(self, dim: int) -> Operand:
        """The view with a dimension of size 1 before dimension ``dim``."""
        shape, strides = self.shape, self.strides
        return replace(self, shape=(*shape[:dim], 1, *shape[dim:]), strides=(*strides[:dim], 0, *strides[dim:]))

    def select(self, dim: int, index: int) -> Operand:
        """The view at ``index`` of dimension ``dim``, which goes."""
        part = self.slice(dim, index, 1)
        return part.permute([d for d in range(len(self.shape)) if d != dim])

    def reshape(self, shape: Sequence[int]) -> Operand:
        """A contiguous operand in another shape. Raises ValueError for one that is not contiguous."""
        if not self.is_contiguous or math.prod(shape) != self.numel:
            raise ValueError(f"shape {self.shape} with strides {self.strides} is no view of shape {tuple(shape)}")
        return replace(self, shape=tuple(shape), strides=contiguous_strides(shape))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in row-major order."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def new(b: Builder, shape: Sequence[int], dtype: torch.dtype) -> Operand:
    """A contiguous operand in scratch memory."""
    return over(b.scratch(4 * math.prod(shape)), shape, dtype)


def new_like(b: Builder, x: Operand, dtype: torch.dtype) -> Operand:
    """A new operand of x's shape: in memory as x is if x is an image whose channels are innermost, else contiguous.

    Convolutions of quantized layers give such images, and take them as they are.
    """
    made = new(b, x.shape, dtype)
    return replace(made, strides=x.strides) if _channels_last(x) else made


def _channels_last(x: Operand) -> bool:
    return len(x.shape) == 4 and not x.is_contiguous and x.permute((0, 2, 3, 1)).is_contiguous


def over(ref: Ref, shape: Sequence[int], dtype: torch.dtype) -> Operand:
    """A contiguous operand at the beginning of ``ref``."""
    return Operand(ref, tuple(shape), contiguous_strides(shape), dtype)


def result(
    b: Builder, shape: Sequence[int], dtype: torch.dtype, out: Operand | None, *like: Operand | float
) -> Operand:
    """``out`` if it is given, which must have this shape and dtype, else a new operand.

    New ones are in memory as the first of ``like`` that has their shape and its channels innermost, else contiguous.
    """
    if out is None:
        same = (x for x in like if isinstance(x, Operand) and x.shape == tuple(shape) and _channels_last(x))
        first = next(same, None)
        return new(b, shape, dtype) if first is None else new_like(b, first, dtype)
    if out.shape != tuple(shape) or out.dtype != dtype:
        raise ValueError(f"the result has shape {tuple(shape)} and {dtype}, and out has {out.shape} and {out.dtype}")
    return out


def merge(shape: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Sizes and each operand's strides, innermost first, with dimensions merged that lie evenly in every operand.

    Raises ValueError if more than `MOST_DIMS` remain.
    """
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for dim in reversed(range(len(shape))):
        size, own = shape[dim], [values[dim] for values in strides]
        if size == 1:
            continue
        if sizes and all(stride == steps[-1] * sizes[-1] for stride, steps in zip(own, kept, strict=True)):
            sizes[-1] *= size
            continue
        sizes.append(size)
        for steps, stride in zip(kept, own, strict=True):
            steps.append(stride)
    if not sizes:
        return [1], [[0] for _ in strides]
    if len(sizes) > MOST_DIMS:
        raise ValueError(f"a view of {len(sizes)} dimensions that cannot be merged: copy it to contiguous memory first")
    return sizes, kept
