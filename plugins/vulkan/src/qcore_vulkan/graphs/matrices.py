"""Operands as the matrices of quantized layers, whose rows are padded to 16 bytes, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..steps import Rows, rows_pitch
from ..steps.operand import Operand, contiguous_strides
from ..steps.pointwise import convert
from .lowering import Lowering
from .views import reshaped


def rows_of(c: Lowering, x: Operand) -> Rows:
    """An operand ``(..., K)`` as a matrix whose rows are dense and aligned: copied if it is not."""
    k = x.shape[-1]
    matrix = reshaped(x, (x.numel // k, k))
    found = None if matrix is None else as_rows(c, matrix)
    if found is not None:
        return found
    rows, pitch = x.numel // k, rows_pitch(k, torch.float32)
    made = Rows(c.b.scratch(4 * rows * pitch), rows, k, pitch, torch.float32)
    convert(c.b, x, torch.float32, out=operand_of(made, x.shape))
    return made


def as_rows(c: Lowering, x: Operand) -> Rows | None:
    """A matrix as rows if its memory allows it."""
    rows, k = x.shape
    pitch = x.strides[0] if rows > 1 else rows_pitch(k, torch.float32)
    start, nbytes = 4 * x.offset, 4 * ((rows - 1) * pitch + rows_pitch(k, torch.float32))
    dense = (k == 1 or x.strides[1] == 1) and pitch % 4 == 0 and pitch >= k
    aligned = start % c.b.device.description.limits.storage_align == 0
    if x.dtype != torch.float32 or not dense or not aligned or start + nbytes > x.ref.bytes:
        return None
    return Rows(x.ref if start == 0 else x.ref.part(start, nbytes), rows, k, pitch, torch.float32)


def operand_of(rows: Rows, shape: Sequence[int]) -> Operand:
    """A matrix as an operand ``(..., N)``."""
    strides = contiguous_strides(shape[:-1])
    return Operand(rows.ref, tuple(shape), (*(rows.pitch * stride for stride in strides), 1), torch.float32)
