"""Views of operands: other shapes and strides of the same memory, which take no step of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..steps.operand import Operand

Shape = tuple[int, ...]


def reshaped(x: Operand, shape: Sequence[int]) -> Operand | None:
    """The operand in another shape; None if its strides do not allow that without a copy."""
    strides = reshaped_strides(x.shape, x.strides, tuple(shape))
    return None if strides is None else replace(x, shape=tuple(shape), strides=strides)


def reshaped_strides(old: Shape, strides: Shape, new: Shape) -> Shape | None:
    """The strides of elements ``old`` in the shape ``new``; None if there are none."""
    runs = _runs(old, strides)
    found = [1] * len(new)
    left, stride = 1, 1  # elements of the present run that are still to be spread, and the stride of the next
    for at in reversed(range(len(new))):
        size = new[at]
        if size == 1:
            found[at] = 0
            continue
        if left == 1:
            left, stride = runs.pop()
        if left % size:
            return None
        found[at], left, stride = stride, left // size, stride * size
    return tuple(found)


def _runs(shape: Shape, strides: Shape) -> list[tuple[int, int]]:
    """Adjacent dimensions that are one in memory, joined: sizes and strides, without sizes of 1."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == stride * size:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs


def expanded(x: Operand, shape: Sequence[int]) -> Operand:
    """As `torch.Tensor.expand`; -1 keeps a size."""
    own = (1,) * (len(shape) - len(x.shape)) + x.shape
    return x.broadcast_to([have if want == -1 else want for want, have in zip(shape, own, strict=True)])


def squeezed(x: Operand, dims: Sequence[int]) -> Operand:
    """Without those of ``dims`` whose size is 1."""
    gone = {dim % len(x.shape) for dim in dims} if x.shape else set()
    return x.permute([i for i, size in enumerate(x.shape) if i not in gone or size != 1])


def bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Start and end of a slice of ``size`` elements, as torch reads negative and too large numbers."""
    first = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    last = size if end is None else min(max(end + size if end < 0 else end, 0), size)
    return first, max(first, last)


def overlaps(x: Operand) -> bool:
    """Whether two indices name the same element: an expanded dimension."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.strides, strict=True))
