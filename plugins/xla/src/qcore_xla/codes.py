"""Packed weights as arrays of codes, split into planes so that unpacking moves no data.

int8 weights are int8 arrays and int4 ones int32 words of eight nibbles: nibble j of word i of a run of K codes is code
``j * K/8 + i``, so plane j of the words is a run of K/8 consecutive codes. Arrays of `jax.numpy.int4` are used as is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

NIBBLES = 8
"""Codes per int32 word."""


@jax.tree_util.register_pytree_node_class
class Coded:
    """Words whose nibbles are numbers of a table, in the place of an array of codes: `planes` gives these numbers.

    **Fields:** ``words``: int32; ``table``: 16 numbers.
    """

    def __init__(self, words: Any, table: tuple[float, ...]) -> None:
        self.words, self.table = words, table

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the words."""
        return self.words.shape  # type: ignore[no-any-return]

    @property
    def ndim(self) -> int:
        """Of the words."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Of the words."""
        return self.words.dtype

    def reshape(self, *shape: int) -> Coded:
        """The same words in another shape."""
        return Coded(self.words.reshape(*shape), self.table)

    def taken(self, indices: Array) -> Coded:
        """Rows of the words."""
        return Coded(jnp.take(self.words, indices, axis=0, mode="clip"), self.table)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[float, ...]]:
        """For JAX."""
        return (self.words,), self.table

    @classmethod
    def tree_unflatten(cls, table: tuple[float, ...], words: tuple[Any]) -> Coded:
        """For JAX."""
        return cls(words[0], table)


def planes(data: Array | Coded, axis: int, dtype: jnp.dtype) -> Array:
    """Codes of ``dtype`` with ``axis``, the one along K, split in two: (planes, codes per plane)."""
    if isinstance(data, Coded):
        return _looked_up(planes(data.words, axis, jnp.dtype(jnp.int32)), data.table, dtype)
    expanded = lax.expand_dims(data, (axis,))
    if data.dtype != jnp.int32:
        return expanded.astype(dtype)
    shape = (*data.shape[:axis], NIBBLES, *data.shape[axis:])
    # Shift the nibble to the top, then back with sign extension.
    up = 28 - 4 * lax.broadcasted_iota(jnp.int32, shape, axis)
    words = jnp.broadcast_to(expanded, shape)
    return lax.shift_right_arithmetic(lax.shift_left(words, up), jnp.full(shape, 28, jnp.int32)).astype(dtype)


def _looked_up(codes: Array, table: tuple[float, ...], dtype: jnp.dtype) -> Array:
    """Entries ``codes & 15`` of a table, by selections: a gather takes longer on every platform."""
    found = [jnp.asarray(number, dtype) for number in table]
    for bit in range(4):
        is_set = (codes & (1 << bit)) != 0
        found = [jnp.where(is_set, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def length(data: Array | Coded, axis: int) -> int:
    """Codes along ``axis``."""
    return int(data.shape[axis]) * (NIBBLES if data.dtype == jnp.int32 else 1)
