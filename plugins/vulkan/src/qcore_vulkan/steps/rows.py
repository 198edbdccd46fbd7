"""Matrices on a device, as passed between steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .. import native
from ..builder import Builder, Ref
from ..description import Limits

NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
"""Element types as numbered in the shaders."""

PART = 64
"""Rows are split at multiples of this, which keeps parts of all per-token data aligned."""
_LARGEST = 128 << 20
"""Bytes of scratch memory of a step, unless a single part of the rows needs more."""
_MOST = 1 << 17
"""Rows of a step: tiles of two rows would still be within the workgroups that every device supports along one axis."""


@dataclass(frozen=True)
class Rows:
    """A matrix of activations.

    **Fields:** ``pitch``: elements from one row to the next, see `rows_pitch`; ``dtype`` in memory; ``coarse``: whether
    a product may round float32 values to eleven bits, since their model computes in 16-bit floats.
    """

    ref: Ref
    rows: int
    columns: int
    pitch: int
    dtype: torch.dtype
    coarse: bool = False

    def part(self, start: int, count: int) -> Rows:
        """Rows ``start`` ... ``start + count - 1``; ``start`` is a multiple of `PART`."""
        if count == self.rows:
            return self
        row = self.pitch * self.dtype.itemsize
        return replace(self, ref=self.ref.part(start * row, count * row), rows=count)


@dataclass(frozen=True)
class FloatRows:
    """Activations for a float product, float32 or float16, padded as the weight is; ``stride``: elements of a row."""

    ref: Ref
    rows: int
    stride: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Int8Rows:
    """Quantized activations, padded as the weight is.

    **Fields:** ``codes``: four to a word, ``words`` words a row; ``params``: float32 scale per row, int32 zero point
    per row, int32 ``(rows, groups)`` sums of q - z, one after another; ``asymmetric``: whether zero points may differ
    from 0.
    """

    codes: Ref
    params: Ref
    rows: int
    words: int
    groups: int
    asymmetric: bool


def rows_pitch(columns: int, dtype: torch.dtype) -> int:
    """Elements from row to row of a matrix on the device: rows begin at multiples of 16 bytes."""
    step = 16 // dtype.itemsize
    return -(-columns // step) * step


def rows_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes of a matrix on the device."""
    return rows * rows_pitch(columns, dtype) * dtype.itemsize


def new_rows(b: Builder, rows: int, columns: int, dtype: torch.dtype, out: Ref | None = None) -> Rows:
    """A matrix in ``out``, by default in scratch memory."""
    ref = b.scratch(rows_bytes(rows, columns, dtype)) if out is None else out
    return Rows(ref, rows, columns, rows_pitch(columns, dtype), dtype)


def is_local(b: Builder, x: Rows) -> bool:
    """Whether the device reads x from its own memory; INPUT may be across a bus."""
    return b.device.description.local_input or x.ref.buffer != native.INPUT


def local(b: Builder, x: Rows) -> Rows:
    """The same values in the device's memory, for steps that read them more than once."""
    if is_local(b, x):
        return x
    ref = b.scratch(x.ref.bytes)
    b.copy(x.ref, ref)
    return replace(x, ref=ref)


def largest_piece(limits: Limits) -> int:
    """Bytes of scratch memory that one step may use for a result or a copy of its rows."""
    return min(_LARGEST, limits.max_storage_range, limits.max_allocation)


def row_parts(b: Builder, rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, count) of parts of the rows for which scratch memory of ``row_bytes`` per row stays within limits."""
    largest = largest_piece(b.device.description.limits)
    step = max(1, min(_MOST, largest // max(1, row_bytes)) // PART) * PART
    for start in range(0, rows, step):
        mark = b.mark()
        yield start, min(step, rows - start)
        b.rewind(mark)
