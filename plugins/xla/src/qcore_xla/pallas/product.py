"""The product of activations with a packed weight, for TPUs: nibbles are unpacked in on-chip memory.

XLA fuses the unpacking of int4 into a product of floats, but not into one of int8: it would write the weight as int8 to
memory first. Here a tile of words is read, unpacked and multiplied, and not written back.

The grid is (tiles of rows, tiles of columns, steps along K), K innermost. Pallas copies the blocks of the next step
from HBM to on-chip memory (VMEM) while the current ones are multiplied; the tile of sums stays in VMEM over all steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..codes import NIBBLES, length
from . import compiler_parameters

_ROWS, _COLUMNS, _DEPTH = 256, 512, 1024
"""The largest tile: rows of x, columns of the weight, codes along K. About 2 MB of a TPU's 16 MB or more on chip."""
_LANES = 128
Ref = Any


class Tiles(NamedTuple):
    """The tile of a step: ``rows`` and ``columns`` of the result, ``slices`` of K, and whole ``groups`` in those.

    ``groups`` is 0 if there is one group only: sums then run over all steps, and the scale is applied last.
    """

    rows: int
    columns: int
    slices: int
    groups: int


def why_not(data_shape: tuple[int, ...], codes: int, groups: int) -> str:
    """Why data ``(S, words, N)``, S slices of ``codes`` codes in ``groups`` groups, has no tiles; else empty."""
    slices, words, _ = data_shape
    if words % 8:
        return f"slices of {codes} codes do not fill the 8 rows of a TPU's registers; use XLA's own product for them."
    if not _steps(slices, codes, groups):
        return f"no step along K of {slices} slices of {codes} codes fills the {_LANES} lanes of a TPU's registers."
    return ""


def tiles(m: int, data_shape: tuple[int, ...], codes: int, groups: int) -> Tiles:
    """The tiles for x ``(m, S * codes)`` and data ``(S, words, N)`` in ``groups`` groups.

    Raises `ValueError` if `why_not` gives a reason.
    """
    if reason := why_not(data_shape, codes, groups):
        raise ValueError(reason)
    slices, _, n = data_shape
    chosen = _steps(slices, codes, groups)[-1]
    return Tiles(min(m, _ROWS), min(n, _COLUMNS), chosen, 0 if groups == 1 else chosen // (slices // groups))


def _steps(slices: int, codes: int, groups: int) -> list[int]:
    """The numbers of slices that a step may take, in ascending order."""
    # A step takes whole groups, or any number of slices of a single group; its columns of x fill whole lanes or are all
    # of K. The longest step of at most _DEPTH codes is chosen: fewer steps, longer copies.
    step = 1 if groups == 1 else slices // groups
    return [
        s for s in range(step, slices + 1, step)
        if slices % s == 0 and (s * codes % _LANES == 0 or s == slices) and (s == step or s * codes <= _DEPTH)
    ]  # fmt: skip


def product(x: Array, data: Array, scale: Array, *, interpret: Any = False) -> Array:
    """``sum over groups of scale * (x @ codes)``, float32 ``(M, N)``.

    ``x``: ``(M, K)``, float or int8 codes; ``data``: int8 ``(S, b, N)`` or int32 words ``(S, b/8, N)``; ``scale``:
    ``(G, N)``. Sums of int8 codes are exact within a group. Raises `ValueError` as `tiles` does.
    """
    codes, groups = length(data, 1), scale.shape[0]
    cut = tiles(x.shape[0], data.shape, codes, groups)
    m, n = x.shape[0], data.shape[2]
    grid = (pl.cdiv(m, cut.rows), pl.cdiv(n, cut.columns), data.shape[0] // cut.slices)
    held = max(1, cut.groups)  # rows of scales of a step; a single group has one for all steps
    y: Array = pl.pallas_call(
        partial(_kernel, cut=cut, codes=codes),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=grid,
        # Blocks by (row tile i, column tile j, step k): x at (i, k), the weight at (k, j), the result at (i, j).
        in_specs=[
            pl.BlockSpec((cut.rows, cut.slices * codes), lambda i, _, k: (i, k)),
            pl.BlockSpec((cut.slices, data.shape[1], cut.columns), lambda _, j, k: (k, 0, j)),
            pl.BlockSpec((held, 1, cut.columns), lambda _, j, k: (k if cut.groups else 0, 0, j)),
        ],
        out_specs=pl.BlockSpec((cut.rows, cut.columns), lambda i, j, _: (i, j)),
        # Sums of a single group stay in the dtype of the products (int32 for codes, exact) until the last step.
        scratch_shapes=[pltpu.VMEM((cut.rows, cut.columns), _sum_dtype(x) if not cut.groups else jnp.float32)],
        # Tiles of the result are independent; steps along K add to one tile and must run in order.
        compiler_params=compiler_parameters(
            pltpu, "TPUCompilerParams", dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="qcore_product",
    )(x, data, scale.astype(jnp.float32)[:, None, :])
    return y


def _kernel(x: Ref, data: Ref, scale: Ref, y: Ref, total: Ref, *, cut: Tiles, codes: int) -> None:
    """One tile of the result, one step along K: adds to ``total``, and writes ``y`` after the last step."""
    step, steps = pl.program_id(2), pl.num_programs(2)

    @pl.when(step == 0)
    def _start() -> None:
        total[...] = jnp.zeros_like(total)

    # Products of a group are added before they are scaled: int32 sums of codes are exact, and become float32 once.
    each = cut.slices // max(1, cut.groups)  # slices of a group in this step
    for group in range(max(1, cut.groups)):
        part = sum(_slice(x, data, group * each + s, codes) for s in range(each))
        total[...] += part if not cut.groups else part.astype(jnp.float32) * scale[group]

    @pl.when(step == steps - 1)
    def _finish() -> None:
        y[...] = total[...] if cut.groups else total[...].astype(jnp.float32) * scale[0]


def _slice(x: Ref, data: Ref, s: int, codes: int) -> Any:
    """X ``(rows, codes)`` of slice ``s`` times its weight: int32 for codes, else float32."""
    left = x[:, s * codes : (s + 1) * codes]
    exact = left.dtype == jnp.float32  # the matrix unit would round float32 operands to bfloat16 otherwise
    return lax.dot_general(
        left, _unpacked(data[s], left.dtype), (((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None, preferred_element_type=_sum_dtype(left),
    )  # fmt: skip


def _unpacked(tile: Array, dtype: Any) -> Array:
    """Codes ``(b, columns)`` of a tile of int8 codes, or of words: concatenated planes are in the order of K."""
    if tile.dtype != jnp.int32:
        return tile.astype(dtype)
    # Shift left, then right: to the top of the word, then back with sign extension.
    planes = [lax.shift_right_arithmetic(lax.shift_left(tile, 28 - 4 * j), 28) for j in range(NIBBLES)]
    # Through float32 or int32, whose tiles have 8 rows: narrower dtypes would split a plane across tiles.
    wide = jnp.concatenate(planes, axis=0)
    return wide.astype(jnp.float32).astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else wide.astype(dtype)


def _sum_dtype(x: Array) -> Any:
    return jnp.int32 if x.dtype == jnp.int8 else jnp.float32
