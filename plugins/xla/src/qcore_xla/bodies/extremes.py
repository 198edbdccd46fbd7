"""Largest and smallest values along axes, NaN if one of them is.

``jnp.max`` and ``jnp.min`` promise the same, but XLA:CPU drops NaN in large arrays (jax 0.10.2, from 4096 elements on).
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


def largest_magnitude(x: Array, axis: Any = None, keepdims: bool = False) -> Array:
    """The largest magnitudes of x along ``axis``, all axes if None, in float32.

    By their bits as integers, which have the same order, with NaN above Inf: one reduction.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis=axis, keepdims=keepdims), jnp.float32)


def _extreme(reduce: Callable[..., Array], x: Array, axis: Any, keepdims: bool) -> Array:
    found = reduce(x, axis=axis, keepdims=keepdims)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return found
    return jnp.where(jnp.any(jnp.isnan(x), axis=axis, keepdims=keepdims), jnp.asarray(jnp.nan, x.dtype), found)
