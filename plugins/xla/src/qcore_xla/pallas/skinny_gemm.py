"""The product of a few rows with int4 weights stored by rows, for GPUs, through Pallas's Triton.

XLA dequantizes a weight in groups to memory before it multiplies, or multiplies group by group. Here words are
unpacked in registers and passed to the matrix units from there, as the left operand; a single row is multiplied without
them.

The grid is (tiles of columns of the result, splits of K): a program computes ``SkinnyTiles.columns`` columns of all
rows from its split of K, and the splits are added up afterwards. It loads words and scales from global memory step by
step, Triton keeping `STAGES` steps in flight, and holds its sums in registers; every program reads the same few rows of
x.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ..codes import NIBBLES
from . import compiler_parameters

MOST_ROWS = 64
"""With more rows XLA's own product is about as fast, or faster."""
WARPS, STAGES = 4, 3
"""Warps of a program; steps of its loop that Triton keeps in flight."""
_WIDE = 8192
"""From this many columns of a result on, two parts of K give enough programs for a GPU."""
_LEAST = 16
"""The smallest size of each dimension of Triton's matrix products."""
_EXPONENT = 0x4B000000
"""Bits of the float32 2^23, whose last bit counts ones."""
_OTHERS = tuple(_EXPONENT ^ (8 << 4 * j) for j in range(4))
"""What gives it nibble j plus 8 for its fraction."""
Ref = Any


class SkinnyTiles(NamedTuple):
    """The tile of a program and of a step.

    **Fields:** ``columns`` of the result that a program makes; ``rows`` of x, padded, or 1: without matrix units;
    ``words`` of a row of the weight that a step takes; ``splits``: programs among which a row's words are divided.
    """

    columns: int
    rows: int
    words: int
    splits: int


def tiles(m: int, n: int, groups: int, width: int) -> SkinnyTiles | None:
    """The tiles for x ``(m, 8 * groups * width)`` and data ``(n, groups, width)``; None if XLA's own product is faster.

    Sizes were measured on an H200, and fit into the registers and the shared memory of every GPU since Ampere.
    """
    # Words of a step are whole groups or divide a group, so that a step has one scale per column or whole rows of them.
    sizes = (32, _LEAST) if m == 1 else (_LEAST,)
    words = next((w for w in sizes if groups * width % w == 0 and (w % width == 0 or width % w == 0)), 0)
    if not words or m > MOST_ROWS or n % 64:
        return None
    # More parts of K if few tiles of columns, or little work in each, would leave multiprocessors idle.
    columns = 128 if 1 < m <= 32 and n % 128 == 0 else 64
    parts = 8 if m == 1 else 4 if m <= 32 or n < _WIDE else 2
    rows = 1 if m == 1 else max(_LEAST, 1 << (m - 1).bit_length())
    return SkinnyTiles(columns, rows, words, min(parts, groups * width // words))


def product(x: Array, data: Array, scale: Array, cut: SkinnyTiles, *, interpret: Any = False) -> Array:
    """``sum over groups of scale * (x @ codes)``, float32 ``(M, N)``.

    ``x``: ``(M, K)`` of 16-bit floats; ``data``: int32 words ``(N, G, w)``; ``scale``: ``(G, N)`` of any floats, which
    become float32 in registers: converting them before would be a kernel of its own; ``cut``: `tiles` of them.
    With more than one row, weights are rounded to the dtype of x, unless ``cut.words`` lie in one group.
    """
    parts = partial_sums(x, data, scale, cut, interpret=interpret)
    return (parts[0] if cut.splits == 1 else parts.sum(0))[: x.shape[0]]


def partial_sums(x: Array, data: Array, scale: Array, cut: SkinnyTiles, *, interpret: Any = False) -> Array:
    """`product` before its splits are added up, float32 ``(splits, rows, N)``: who reads it may add them."""
    (m, _), (n, groups, width) = x.shape, data.shape
    if cut.rows == 1:
        order, block = x[0], pl.BlockSpec(x.shape[1:], lambda _j, _p: (0,))
    else:
        filled = jnp.pad(x, ((0, cut.rows - m), (0, 0))) if cut.rows != m else x
        order = _planes(filled, groups, width, cut.words)
        block = pl.BlockSpec(order.shape, lambda _j, _p: (0, 0, 0, 0))
    parts: Array = pl.pallas_call(
        partial(_kernel, cut=cut, width=width),
        out_shape=jax.ShapeDtypeStruct((cut.splits, cut.rows, n), jnp.float32),
        grid=(n // cut.columns, cut.splits),
        # Blocks are views of global memory, loaded by the kernel: all of x, the columns' words, and their scales.
        in_specs=[
            block,
            pl.BlockSpec((cut.columns, groups * width), lambda j, _p: (j, 0)),
            pl.BlockSpec((groups, cut.columns), lambda j, _p: (0, j)),
            pl.BlockSpec((4,), lambda _j, _p: (0,)),
        ],
        out_specs=pl.BlockSpec((1, cut.rows, cut.columns), lambda j, p: (p, 0, j)),
        compiler_params=None if interpret else _compiler(),
        interpret=interpret,
        name="qcore_skinny_gemm",
    )(order, data.reshape(n, groups * width), scale, jnp.asarray(_OTHERS, jnp.int32))
    return parts


def _planes(x: Array, groups: int, width: int, words: int) -> Array:
    """X ``(M, K)`` in the order of the words' nibbles, step by step: ``(steps, 8, M, words)``.

    Nibble j of word i of a group is code ``j * width + i``, so plane j of a step multiplies these columns of x.
    """
    together, each = max(1, words // width), max(1, width // words)  # groups of a step, or steps of a group
    shape = (x.shape[0], groups // together, together, NIBBLES, each, min(width, words))
    return lax.transpose(x.reshape(shape), (1, 4, 3, 0, 2, 5)).reshape(-1, NIBBLES, x.shape[0], words)


def _columns(at: Array, words: int, width: int) -> Array:
    """Where the columns of x lie that multiply nibble 0 of a step's words; those of nibble j lie ``j * width`` on.

    A single row is read where it lies: putting it into the order of `_planes` would be a kernel of its own.
    """
    word = at * words + lax.iota(jnp.int32, words)
    size = jnp.int32(width)  # not `//` and `%`, whose care for signs would hide from Triton that columns are adjacent
    return lax.div(word, size) * (NIBBLES * width) + lax.rem(word, size)


def _compiler() -> Any:
    return compiler_parameters(triton, "TritonCompilerParams", num_warps=WARPS, num_stages=STAGES)


def _kernel(x: Ref, data: Ref, scale: Ref, table: Ref, y: Ref, *, cut: SkinnyTiles, width: int) -> None:
    """Compute a tile ``(columns, rows)`` of the transposed result from this program's split of K."""
    one, steps = cut.rows == 1, data.shape[1] // cut.words
    # Steps of this split; the last ones have fewer, or none, if the splits do not divide them.
    each = pl.cdiv(steps, cut.splits)
    start = pl.program_id(1) * each
    count = each if steps % cut.splits == 0 else jnp.minimum(each, steps - start)

    others = [table[j] for j in range(4)]

    def step(i: Array, total: Array) -> Any:
        # Words go from global memory to registers once, and become eight planes of codes there.
        at = start + i
        codes = _codes(data[:, pl.ds(at * cut.words, cut.words)], others)
        s = _scales(scale, at, cut, width)
        if one:  # elementwise, in float32: the sum over words follows after the loop
            first = _columns(at, cut.words, width)
            planes = [x[first + j * width].astype(jnp.float32)[None, :] for j in range(NIBBLES)]
            return total + s * sum(code * plane for code, plane in zip(codes, planes, strict=True))
        if cut.words <= width:  # one group: codes are exact in 16 bits, sums in float32 are scaled afterwards
            return total + s * sum(_dot(code.astype(x.dtype), x[at, j]) for j, code in enumerate(codes))
        # Several groups: weights are scaled, and rounded to the dtype of x, before they are multiplied.
        for j, code in enumerate(codes):
            total += _dot((code * s).astype(x.dtype), x[at, j])
        return total

    shape = (cut.columns, cut.words if one else cut.rows)
    total = lax.fori_loop(0, count, step, jnp.zeros(shape, jnp.float32))
    y[0] = jnp.sum(total, axis=1)[None] if one else total.T


def _dot(w: Array, x: Array) -> Array:
    return lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _codes(words: Array, others: list[Array]) -> list[Array]:
    """The eight codes of each word, float32, without conversions of integers.

    Four nibbles lie within the 23 bits of a fraction. The bits of nibble j below the exponent of 2^23 are the number
    ``2^23 + u 16^j`` with u the code plus 8: ``(word & mask) ^ other``, which is one operation of a GPU if only one of
    the two is a constant. So ``others`` come from memory. Scaling by ``16^-j`` and the subtraction are exact.
    """
    found = []
    for half in (words, lax.shift_right_logical(words, jnp.int32(16))):
        for j in range(4):
            number = lax.bitcast_convert_type((half & (15 << 4 * j)) ^ others[j], jnp.float32)
            found.append(number * 16.0**-j - (2.0**23 * 16.0**-j + 8))
    return found


def _scales(scale: Ref, at: Array, cut: SkinnyTiles, width: int) -> Any:
    """The scales of a step's words: ``(columns, 1)``, or ``(columns, words)`` of several groups."""
    if cut.words <= width:
        return scale[at * cut.words // width, :].astype(jnp.float32)[:, None]
    groups = cut.words // width
    s = scale[pl.ds(at * groups, groups), :].astype(jnp.float32).T
    return jnp.broadcast_to(s[:, :, None], (cut.columns, groups, width)).reshape(cut.columns, cut.words)
