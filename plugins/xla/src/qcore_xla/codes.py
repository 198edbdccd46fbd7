"""Packed weights as arrays of codes, split into planes so that unpacking moves no data.

int8 weights are int8 arrays and int4 ones int32 words of eight nibbles: nibble j of word i of a run of K codes is code
``j * K/8 + i``, so plane j of the words is a run of K/8 consecutive codes. Arrays of `jax.numpy.int4` are used as is.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

NIBBLES = 8
"""Codes per int32 word."""


def planes(data: Array, axis: int, dtype: jnp.dtype) -> Array:
    """Codes of ``dtype`` with ``axis``, the one along K, split in two: (planes, codes per plane)."""
    expanded = lax.expand_dims(data, (axis,))
    if data.dtype != jnp.int32:
        return expanded.astype(dtype)
    shape = (*data.shape[:axis], NIBBLES, *data.shape[axis:])
    # Shift the nibble to the top, then back with sign extension.
    up = 28 - 4 * lax.broadcasted_iota(jnp.int32, shape, axis)
    words = jnp.broadcast_to(expanded, shape)
    return lax.shift_right_arithmetic(lax.shift_left(words, up), jnp.full(shape, 28, jnp.int32)).astype(dtype)


def length(data: Array, axis: int) -> int:
    """Codes along ``axis``."""
    return int(data.shape[axis]) * (NIBBLES if data.dtype == jnp.int32 else 1)
