"""Calls split into parts, if activations exceed the limit of a device or its memory runs out.

A convolution is split into boxes of its result: along the images, then the rows of one image, then the positions of one
row. So the results of a box are contiguous, channels last.
"""

from __future__ import annotations

from collections.abc import Callable

from .native import OutOfMemory

Sizes = tuple[int, int, int]
"""Images, rows and columns of a result."""

Span = tuple[int, int]
Box = tuple[Span, Span, Span]
"""Images, rows and columns of a result, from ... to."""


def in_parts(count: int, most: int, run: Callable[[int, int], None]) -> None:
    """Call ``run(start, stop)`` over ``range(count)``, at most ``most`` at a time, fewer if memory runs out."""
    start, most = 0, max(1, min(count, most))
    while start < count:
        stop = min(count, start + most)
        try:
            run(start, stop)
        except OutOfMemory:
            if stop - start == 1:
                raise
            most = (stop - start) // 2
        else:
            start = stop


def in_boxes(sizes: Sizes, fits: Callable[[Sizes], bool], run: Callable[[Box], None]) -> None:
    """Call ``run`` on boxes that make up the result; ``fits``: whether a box of these sizes is allowed."""
    images, rows, columns = sizes
    _cut(((0, images), (0, rows), (0, columns)), 0, fits, run)


def _cut(box: Box, axis: int, fits: Callable[[Sizes], bool], run: Callable[[Box], None]) -> None:
    """Split a box along an axis, and a single part that is still too large along the next one."""
    first, stop = box[axis]

    def part(start: int, end: int) -> Box:
        spans = [*box]
        spans[axis] = (first + start, first + end)
        return spans[0], spans[1], spans[2]

    def run_part(start: int, end: int) -> None:
        found = part(start, end)
        if end - start > 1 or axis == 2:
            run(found)
            return
        if fits(_sizes(found)):
            try:
                run(found)
            except OutOfMemory:
                pass
            else:
                return
        _cut(found, axis + 1, fits, run)

    most = stop - first
    while most > 1 and not fits(_sizes(part(0, most))):
        most = -(-most // 2)
    in_parts(stop - first, most, run_part)


def _sizes(box: Box) -> Sizes:
    (image, images), (row, rows), (column, columns) = box
    return images - image, rows - row, columns - column
