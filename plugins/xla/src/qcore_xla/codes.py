"""Packed weights as arrays of codes, split into planes so that unpacking moves no data.

Codes of 8 bits are int8 arrays and those of 4 bits int32 words of eight nibbles: nibble j of word i of a run of K codes
is code ``j * K/8 + i``, so plane j of the words is a run of K/8 consecutive codes. Arrays of `jax.numpy.int4` are used
as is. `Encoding` says which numbers codes stand for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

NIBBLES = 8
"""Codes per int32 word."""
_OF_NIBBLES = 16
"""Entries of a table of 4 bits."""


@dataclass(frozen=True)
class Encoding:
    """What stored codes stand for.

    **Fields:** ``float8``: the NumPy name of the float type whose bytes the codes are; ``table``: the 16 or 256 numbers
    that codes of 4 or 8 bits index; with neither, codes are signed integers. ``divides``: whether scales are divided by
    the global scale, if a weight has one, or multiplied.
    """

    float8: str = ""
    table: tuple[float, ...] = ()
    divides: bool = False

    @property
    def integer(self) -> bool:
        """Whether codes are signed integers."""
        return not (self.float8 or self.table)

    def fits(self, dtype: Any) -> bool:
        """Whether a float dtype holds the numbers of all codes exactly."""
        return _fits(self.table, jnp.dtype(dtype))


INTEGERS = Encoding()
"""Signed integers."""


@lru_cache(maxsize=256)
def _fits(table: tuple[float, ...], dtype: Any) -> bool:
    exact = np.asarray(table, np.float32)
    return bool((exact.astype(dtype).astype(np.float32) == exact).all())


@jax.tree_util.register_pytree_node_class
class Coded:
    """Codes that are no integers, in the place of an array of codes: `planes` gives the numbers they stand for.

    **Fields:** ``words``: int8, or int32 of nibbles; ``encoding``.
    """

    def __init__(self, words: Any, encoding: Encoding) -> None:
        self.words, self.encoding = words, encoding

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
        return Coded(self.words.reshape(*shape), self.encoding)

    def tree_flatten(self) -> tuple[tuple[Any], Encoding]:
        """For JAX."""
        return (self.words,), self.encoding

    @classmethod
    def tree_unflatten(cls, encoding: Encoding, words: tuple[Any]) -> Coded:
        """For JAX."""
        return cls(words[0], encoding)


Codes: TypeAlias = Array | Coded
"""Codes as `planes` takes them."""


def coded(data: Array, of: Encoding) -> Codes:
    """Stored codes as an argument of `planes`."""
    return data if of.integer else Coded(data, of)


def times_global(x: Array, factor: Array | None, of: Encoding) -> Array:
    """Scales, or products with them, by the global scale ``factor``, float32, which broadcasts; None: there is none."""
    if factor is None:
        return x
    wide: Array = x.astype(jnp.float32)
    return wide / factor if of.divides else wide * factor


def planes(data: Codes, axis: int, dtype: jnp.dtype) -> Array:
    """Codes of ``dtype`` with ``axis``, the one along K, split in two: (planes, codes per plane)."""
    if isinstance(data, Coded):
        return _decoded(data, axis, dtype)
    expanded = lax.expand_dims(data, (axis,))
    if data.dtype != jnp.int32:
        return expanded.astype(dtype)
    shape = (*data.shape[:axis], NIBBLES, *data.shape[axis:])
    # Shift the nibble to the top, then back with sign extension.
    up = 28 - 4 * lax.broadcasted_iota(jnp.int32, shape, axis)
    words = jnp.broadcast_to(expanded, shape)
    return lax.shift_right_arithmetic(lax.shift_left(words, up), jnp.full(shape, 28, jnp.int32)).astype(dtype)


def _decoded(data: Coded, axis: int, dtype: jnp.dtype) -> Array:
    float8, table = data.encoding.float8, data.encoding.table
    if float8:
        return planes(lax.bitcast_convert_type(data.words, jnp.dtype(float8)), axis, dtype)
    codes = planes(data.words, axis, jnp.dtype(jnp.int32))
    if len(table) > _OF_NIBBLES:
        return jnp.take(jnp.asarray(table, dtype), codes & (len(table) - 1), mode="clip")
    return _looked_up(codes, table, dtype)


def _looked_up(codes: Array, table: tuple[float, ...], dtype: jnp.dtype) -> Array:
    """Entries ``codes & 15`` of a table, by selections: a gather takes longer on every platform."""
    found = [jnp.asarray(number, dtype) for number in table]
    for bit in range(4):
        is_set = (codes & (1 << bit)) != 0
        found = [jnp.where(is_set, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def length(data: Codes, axis: int) -> int:
    """Codes along ``axis``."""
    return int(data.shape[axis]) * (NIBBLES if data.dtype == jnp.int32 else 1)
