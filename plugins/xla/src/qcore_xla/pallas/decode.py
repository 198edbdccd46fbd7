"""Attention of one token over a KV cache, for GPUs, through Pallas's Triton: rotation and the write included.

XLA makes eight kernels of it. Here a first kernel adds up the splits of the product that gave queries, key and value
(`skinny_gemm.partial_sums`), rotates them, writes the token's key and value into the caches, and attends, each program
to some places of one head of keys. A second one joins their results.

The first split of each head takes the new token's key and value from its registers, and one split writes them; what all
of them read at that place counts for nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from . import compiler_parameters

WARPS, STAGES = (4, 2), 2
"""Warps of a program of each kernel; steps of a loop that Triton keeps in flight."""
_PROGRAMS = 128
"""About as many as a large GPU has multiprocessors."""
_LEAST = 16
"""The smallest size of each dimension of Triton's matrix products."""
_MOST_ROWS = 32
_BLOCKS = (64, 32, 16)
Ref = Any


class Cut(NamedTuple):
    """``block``: places that a program reads at once; ``each``: blocks of a program; ``splits``: programs of a head."""

    block: int
    each: int
    splits: int


def cut_of(heads: int, cache: tuple[int, ...], dtype: Any) -> Cut | None:
    """The programs for ``heads`` heads of queries and caches ``(Hk, S, E)``; None if XLA should attend."""
    groups, places, size = cache
    block = next((block for block in _BLOCKS if places % block == 0), 0)
    fits = size in (64, 128, 256) and heads % groups == 0 and heads // groups <= _MOST_ROWS
    if not (block and fits and dtype in (jnp.bfloat16, jnp.float16)):
        return None
    blocks = places // block
    each = max(1, blocks * groups // _PROGRAMS)
    splits = 1 << (-(-blocks // each) - 1).bit_length()
    return Cut(block, each, splits)


def attention(
    parts: Array, cos: Array, sin: Array, keys: Array, values: Array, places: Array, bias: Array, heads: int,
    scale: float, cut: Cut, layer: int = 0, *, interpret: Any = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Attend, and give ``(heads, E)`` and the new caches, which take the memory of those given.

    ``parts``: float32 ``(P, (heads + 2 Hk) * E)``, whose sums, rounded to the dtype of the caches, are queries, key and
    value, head by head; ``cos``, ``sin``: ``(E,)``; ``keys``, ``values``: ``(Hk, S, E)``; ``places``: int32 ``(L,)``,
    of the new token in the caches of L layers, of which this is number ``layer``; ``bias``: float32 ``(S,)``, added to
    scores.
    """
    groups, _, size = keys.shape
    spread = heads // groups
    shapes = (
        jax.ShapeDtypeStruct(keys.shape, keys.dtype),
        jax.ShapeDtypeStruct(values.shape, values.dtype),
        jax.ShapeDtypeStruct((groups, cut.splits, spread, size), jnp.float32),
        jax.ShapeDtypeStruct((groups, cut.splits, spread), jnp.float32),
        jax.ShapeDtypeStruct((groups, cut.splits, spread), jnp.float32),
    )

    def whole(one: Any) -> pl.BlockSpec:
        nowhere = (0,) * len(one.shape)  # blocks are views of global memory, loaded by the kernels
        return pl.BlockSpec(one.shape, lambda *_: nowhere)

    given = (parts, cos, sin, places, bias, keys, values)
    keys, values, mixed, top, total = pl.pallas_call(
        partial(_part, heads=heads, scale=scale, cut=cut, layer=layer),
        out_shape=shapes,
        grid=(groups, cut.splits),
        in_specs=[whole(one) for one in given],
        out_specs=tuple(whole(one) for one in shapes),
        input_output_aliases={5: 0, 6: 1},
        compiler_params=_compiler(interpret, WARPS[0]),
        interpret=interpret,
        name="qcore_decode_attention",
    )(*given)
    row = jax.ShapeDtypeStruct((heads, size), keys.dtype)
    y: Array = pl.pallas_call(
        partial(_join, spread=spread),
        out_shape=row,
        grid=(heads,),
        in_specs=[whole(one) for one in (mixed, top, total)],
        out_specs=whole(row),
        compiler_params=_compiler(interpret, WARPS[1]),
        interpret=interpret,
        name="qcore_decode_join",
    )(mixed, top, total)
    return y, keys, values


def _compiler(interpret: Any, warps: int) -> Any:
    if interpret:
        return None
    return compiler_parameters(triton, "TritonCompilerParams", num_warps=warps, num_stages=STAGES)


def _rotated(halves: tuple[Array, Array], cos: Ref, sin: Ref, dtype: Any) -> tuple[Array, Array]:
    """The halves of heads, rotated; every step is rounded, as torch rounds it."""
    half = halves[0].shape[-1]

    def rounded(x: Array) -> Array:
        return _wide(x.astype(dtype))

    def angles(of: Ref, start: int) -> Array:
        return _wide(of[pl.ds(start, half)])

    a, b = halves
    first = rounded(a * angles(cos, 0)) + rounded(-b * angles(sin, 0))
    second = rounded(b * angles(cos, half)) + rounded(a * angles(sin, half))
    return first.astype(dtype), second.astype(dtype)


def _part(
    parts: Ref, cos: Ref, sin: Ref, where: Ref, bias: Ref, old_keys: Ref, old_values: Ref,
    keys: Ref, values: Ref, mixed: Ref, top: Ref, total: Ref, *, heads: int, scale: float, cut: Cut,
    layer: int,
) -> None:  # fmt: skip
    """One split of one head of keys; the heads of queries that share it are the rows of its products."""
    group, split = pl.program_id(0), pl.program_id(1)
    groups, places, size = keys.shape
    dtype, half, spread = keys.dtype, size // 2, heads // groups
    rows = max(_LEAST, 1 << (spread - 1).bit_length())
    row = jnp.minimum(lax.iota(jnp.int32, rows), spread - 1)  # rows to spare do the same as the last
    lanes, now = lax.iota(jnp.int32, half), jnp.clip(where[layer], 0, places - 1)

    def halves(start: Array) -> tuple[Array, Array]:
        """The sums of the product's splits, rounded as its result is."""
        found = []
        for at in (start + lanes, start + half + lanes):
            total = sum(parts[p, at] for p in range(1, parts.shape[0])) + parts[0, at]
            found.append(_wide(total.astype(dtype)))
        return found[0], found[1]

    q = _rotated(halves(((group * spread + row) * size)[:, None]), cos, sin, dtype)
    k = _rotated(halves((heads + group) * size), cos, sin, dtype)
    v = [one.astype(dtype) for one in halves((heads + groups + group) * size)]
    step = partial(
        _step, q=q, keys=old_keys, values=old_values, bias=bias, group=group, first=split * cut.each, now=now,
        scale=scale, block=cut.block,
    )  # fmt: skip
    # The first split begins with the new token, the others with nothing.
    score = jnp.sum(_wide(q[0]) * _wide(k[0])[None, :] + _wide(q[1]) * _wide(k[1])[None, :], axis=1) * scale
    score = jnp.where(split == 0, score + bias[now], -jnp.inf)
    weight = jnp.exp(score - _finite(score))
    # Not a product alone: its value may be infinite.
    left, right = (jnp.where(weight[:, None] == 0, 0.0, weight[:, None] * _wide(one)[None, :]) for one in v)
    start = left, right, score, weight
    count = jnp.clip(places // cut.block - split * cut.each, 0, cut.each)
    left, right, top[group, split, row], total[group, split, row] = lax.fori_loop(0, count, step, start)
    mixed[group, split, row[:, None], lanes[None, :]] = left
    mixed[group, split, row[:, None], half + lanes[None, :]] = right

    @pl.when(now // (cut.block * cut.each) == split)
    def _write() -> None:
        for values_of, ref in ((k, keys), (v, values)):
            ref[group, now, pl.ds(0, half)] = values_of[0]
            ref[group, now, pl.ds(half, half)] = values_of[1]


def _step(
    i: Array, state: tuple[Array, ...], *, q: tuple[Array, Array], keys: Ref, values: Ref, bias: Ref, group: Array,
    first: Array, now: Array, scale: float, block: int,
) -> tuple[Array, ...]:  # fmt: skip
    """A block of places: halves of the mixed values, the highest scores, and the sums of weights so far."""
    y1, y2, highest, shares = state
    dtype, half, start = keys.dtype, q[0].shape[-1], (first + i) * block
    at, left, right = pl.ds(start, block), pl.ds(0, half), pl.ds(half, half)
    new = start + lax.iota(jnp.int32, block) == now  # in memory it is old, or new: another program may write it
    scores = _dot(q[0], keys[group, at, left].T) + _dot(q[1], keys[group, at, right].T)
    scores = jnp.where(new[None, :], -jnp.inf, scores * scale + bias[at][None, :])
    highest_now = jnp.maximum(highest, jnp.max(scores, axis=1))
    base = _finite(highest_now)
    shrunk = jnp.exp(highest - base)
    weights = jnp.exp(scores - base[:, None])
    narrow, nothing = weights.astype(dtype), jnp.zeros((), dtype)
    y1 = y1 * shrunk[:, None] + _dot(narrow, jnp.where(new[:, None], nothing, values[group, at, left]))
    y2 = y2 * shrunk[:, None] + _dot(narrow, jnp.where(new[:, None], nothing, values[group, at, right]))
    return y1, y2, highest_now, shares * shrunk + jnp.sum(weights, axis=1)


def _join(mixed: Ref, top: Ref, total: Ref, y: Ref, *, spread: int) -> None:
    """One head of queries: its splits' results, each of which is relative to a maximum of its own."""
    head = pl.program_id(0)
    group, row = head // spread, head % spread
    highest = top[group, :, row]
    weights = jnp.exp(highest - _finite(jnp.max(highest)))
    shares = jnp.sum(weights * total[group, :, row])
    found = jnp.sum(weights[:, None] * mixed[group, :, row, :], axis=0)
    y[head, :] = (found / jnp.where(shares == 0, 1.0, shares)).astype(y.dtype)  # a row that sees nothing gives zeros


def _finite(highest: Array) -> Array:
    """What scores are relative to, also if nothing is seen."""
    return jnp.where(highest == -jnp.inf, 0.0, highest)


def _wide(x: Array) -> Array:
    y: Array = x.astype(jnp.float32)
    return y


def _dot(a: Array, b: Array) -> Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
