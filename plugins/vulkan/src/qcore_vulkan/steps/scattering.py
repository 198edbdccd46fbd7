"""Scatters of single elements, whatever their indices: results do not depend on timing."""

from __future__ import annotations

import math

from ..builder import Builder, fold
from .operand import WORDS, Operand, merge
from .pointwise import convert
from .prepare import LANES

FUNCTIONS = {"set": 0, "add": 1, "multiply": 2, "amax": 3, "amin": 4}
"""What becomes of the target's element and the source's, and their numbers in the shader."""

_MOST_DIMS = 5
_MANY = 1 << 14
"""Lanes that are enough to fill a GPU."""


def scatter(b: Builder, name: str, target: Operand, dim: int, index: Operand, source: Operand | float) -> Operand:
    """In place, as `torch.Tensor.scatter`: an element of ``index`` names the place along ``dim``, its own others.

    ``index``: int32, in range, no larger than the target along other dimensions. ``source``: a number, or as large as
    the index at least, in the target's dtype. NaN is the largest and the smallest. Elements for one place are taken in
    the order of their indices: the last is ``set``.
    """
    if not index.shape:  # as one of one dimension
        index, source = index.unsqueeze(0), source.unsqueeze(0) if isinstance(source, Operand) else source
    shape = index.shape
    if index.numel == 0:
        return target
    given = source if isinstance(source, Operand) else index
    for at, size in enumerate(shape):
        given = given.slice(at, 0, size)
    others = [at for at in range(len(shape)) if at != dim]
    operands = (target, index, given)
    sizes, strides = _merged(shape, others, operands)
    if len(sizes) > _MOST_DIMS:
        dense = [x if x.is_contiguous else convert(b, x, x.dtype) for x in (index, given)]
        return scatter(b, name, target, dim, dense[0], dense[1] if isinstance(source, Operand) else source)
    lines, rows = math.prod(sizes), target.shape[dim]
    each = max(1, rows // max(1, _MANY // lines)) if b.device.profile == "gpu" else rows
    count = lines * -(-rows // each)
    push: list[int | float] = [count, lines, each, shape[dim], *_padded(sizes)]
    for own in strides:
        push += _padded(own)
    push += [x.strides[dim] for x in operands]
    push += [x.offset for x in operands]
    number = not isinstance(source, Operand)
    push.append(_word(source, target) if isinstance(source, (int, float)) else 0)
    constants = (LANES, len(sizes), FUNCTIONS[name], WORDS[target.dtype], int(number))
    b.dispatch("scatter", constants, fold(-(-count // LANES)), push, [given.ref, index.ref, *[None] * 5, target.ref])
    return target


def _merged(
    shape: tuple[int, ...], others: list[int], operands: tuple[Operand, ...]
) -> tuple[list[int], list[list[int]]]:
    """Sizes beside the indexed dimension and each operand's strides, innermost first."""
    return merge([shape[at] for at in others], *([x.strides[at] for at in others] for x in operands))


def _word(value: float, target: Operand) -> int | float:
    return float(value) if WORDS[target.dtype] == 0 else int(value)


def _padded(values: list[int]) -> list[int]:
    return [*values, *[0] * (_MOST_DIMS - len(values))]
