"""Largest and smallest values along axes, NaN if one of them is.

``jnp.max``, ``jnp.min``, ``lax.pmax`` and ``lax.pmin`` promise the same, but XLA:CPU drops NaN between devices, and
in large arrays (jax 0.10.2, from 4096 elements on).

``over``: an axis of the mesh over whose devices the values are spread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def largest(x: Array, axis: Any = None, keepdims: bool = False) -> Array:
    """The largest values of x along ``axis``, all axes if None, in its dtype."""
    return _extreme(jnp.max, x, axis, keepdims)


def smallest(x: Array, axis: Any = None, keepdims: bool = False) -> Array:
    """The smallest values of x along ``axis``, all axes if None, in its dtype."""
    return _extreme(jnp.min, x, axis, keepdims)


def largest_magnitude(x: Array, axis: Any = None, keepdims: bool = False, over: str = "") -> Array:
    """The largest magnitudes of x along ``axis``, all axes if None, in float32.

    By their bits as integers, which have the same order, with NaN above Inf: one reduction.
    """
    return _number(_across(jnp.max(_bits(x.astype(jnp.float32)), axis=axis, keepdims=keepdims), over))


def range_with_zero(x: Array, over: str = "") -> tuple[Array, Array]:
    """The smallest value of each row of x or 0, and the largest or 0, in float32 ``(..., 1)``: one all-reduce."""
    low = jnp.minimum(smallest(x, -1, keepdims=True).astype(jnp.float32), 0)
    high = jnp.maximum(largest(x, -1, keepdims=True).astype(jnp.float32), 0)
    if not over:
        return low, high
    below, above = _number(_across(_bits(jnp.stack([low, high])), over))
    return -below, above


def _bits(x: Array) -> Array:
    """Magnitudes of float32 as integers."""
    return lax.bitcast_convert_type(jnp.abs(x), jnp.int32)


def _number(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _across(bits: Array, over: str) -> Array:
    return lax.pmax(bits, over) if over else bits


def _extreme(reduce: Callable[..., Array], x: Array, axis: Any, keepdims: bool) -> Array:
    found = reduce(x, axis=axis, keepdims=keepdims)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return found
    lost = jnp.max(jnp.isnan(x).astype(jnp.int32), axis=axis, keepdims=keepdims)
    return jnp.where(lost > 0, jnp.asarray(jnp.nan, x.dtype), found)
