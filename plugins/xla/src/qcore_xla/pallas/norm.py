"""RMS norm of one row, for GPUs, through Pallas's Triton: with the residual added and a product's splits added up.

XLA makes three kernels of it: the sum, the sum of squares, and the scaled row. One row is little work, so that
launching them takes most of their time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from . import compiler_parameters

WARPS = 16
_MOST_CHUNKS = 16
"""A row is held in registers in chunks of a power of two elements, as Triton wants them."""
_LONGEST = 16384
"""Elements that the registers of one program hold."""
Ref = Any


def chunk(n: int) -> int:
    """The chunks in which a row of ``n`` is held; 0 if XLA should normalize it."""
    size = n & -n
    return size if n // size <= _MOST_CHUNKS and n <= _LONGEST else 0


def rms_norm(
    x: Array, parts: Array | None, weight: Array | None, eps: float, *, interpret: Any = False
) -> tuple[Array, Array]:
    """``h`` and the norm of ``h``, both ``(N,)`` in the dtype of x; ``h`` is x plus the sum of ``parts``.

    ``x``, ``weight``: ``(N,)`` of one dtype; ``parts``: float32 ``(S, N)``, whose sum is rounded to the dtype of x
    before it is added. As in `qcore.graphs.ops`, the norm is rounded before the weight is applied. N has a `chunk`.
    """
    given = [one for one in (x, parts, weight) if one is not None]
    row = jax.ShapeDtypeStruct(x.shape, x.dtype)
    h, y = pl.pallas_call(
        partial(_kernel, eps=eps, summed=parts is not None, scaled=weight is not None),
        out_shape=(row, row),
        grid=(1,),
        in_specs=[pl.BlockSpec(one.shape, lambda _i, rank=one.ndim: (0,) * rank) for one in given],
        out_specs=(pl.BlockSpec(x.shape, lambda _i: (0,)),) * 2,
        compiler_params=None
        if interpret
        else compiler_parameters(triton, "TritonCompilerParams", num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="qcore_rms_norm",
    )(*given)
    return h, y


def _kernel(*refs: Ref, eps: float, summed: bool, scaled: bool) -> None:
    x, *rest = refs
    h, y = rest[-2:]
    parts = rest[0] if summed else None
    weight = rest[int(summed)] if scaled else None
    n, dtype = x.shape[0], x.dtype
    size = chunk(n)
    chunks, total = [], jnp.zeros((), jnp.float32)
    for start in range(0, n, size):
        at = pl.ds(start, size)
        wide = x[at].astype(jnp.float32)
        if parts is not None:
            added = sum(parts[s, at] for s in range(1, parts.shape[0])) + parts[0, at]
            wide = (wide + added.astype(dtype).astype(jnp.float32)).astype(dtype).astype(jnp.float32)
        h[at] = wide.astype(dtype)
        chunks.append(wide)
        total += jnp.sum(wide * wide)
    scale = lax.rsqrt(total / n + eps)
    for i, wide in enumerate(chunks):
        at = pl.ds(i * size, size)
        normed = (wide * scale).astype(dtype)
        y[at] = normed if weight is None else weight[at] * normed
