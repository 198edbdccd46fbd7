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

_Reduce = Callable[..., Array]


def largest(x: Array, axis: Any = None, keepdims: bool = False, over: str = "") -> Array:
    """The largest values of x along ``axis``, all axes if None, in its dtype."""
    return _extreme(jnp.max, lax.pmax, x, axis, keepdims, over)


def smallest(x: Array, axis: Any = None, keepdims: bool = False, over: str = "") -> Array:
    """The smallest values of x along ``axis``, all axes if None, in its dtype."""
    return _extreme(jnp.min, lax.pmin, x, axis, keepdims, over)


def largest_magnitude(x: Array, axis: Any = None, keepdims: bool = False, over: str = "") -> Array:
    """The largest magnitudes of x along ``axis``, all axes if None, in float32.

    By their bits as integers, which have the same order, with NaN above Inf: one reduction.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    return lax.bitcast_convert_type(_plain(jnp.max, lax.pmax, bits, axis, keepdims, over), jnp.float32)


def _extreme(reduce: _Reduce, across: _Reduce, x: Array, axis: Any, keepdims: bool, over: str) -> Array:
    found = _plain(reduce, across, x, axis, keepdims, over)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return found
    lost = _plain(jnp.max, lax.pmax, jnp.isnan(x).astype(jnp.int32), axis, keepdims, over)
    return jnp.where(lost > 0, jnp.asarray(jnp.nan, x.dtype), found)


def _plain(reduce: _Reduce, across: _Reduce, x: Array, axis: Any, keepdims: bool, over: str) -> Array:
    found = reduce(x, axis=axis, keepdims=keepdims)
    return across(found, over) if over else found
