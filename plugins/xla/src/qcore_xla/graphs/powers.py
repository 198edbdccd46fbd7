"""The rule of powers: of integers, and of floats by the functions that torch takes for some exponents."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .rules import floating, rule, widened


def _integer_power(a: Any, b: Any) -> Any:
    """By squaring, which wraps around as in torch. A negative power is that of a fraction, rounded to zero."""
    if isinstance(b, int) and b >= 0:
        return lax.integer_pow(jnp.asarray(a, jnp.int32), b)
    a, b = jnp.broadcast_arrays(*(jnp.asarray(one, jnp.int32) for one in (a, b)))
    y, square, left = jnp.ones_like(a), a, b
    for _ in range(31):
        y, square, left = jnp.where(left & 1, y * square, y), square * square, left >> 1
    ones = jnp.where(a == 1, 1, jnp.where(a == -1, 1 - 2 * (b & 1), 0))
    return jnp.where(b < 0, ones, y)


_ROOTS = {0.5: jnp.sqrt, -0.5: lax.rsqrt}
"""Powers that torch computes by other functions, but for float16: they differ for infinities and -0."""


@rule("pow")
def _pow(a: Any, b: Any) -> Any:
    if not any(jnp.issubdtype(jnp.result_type(one), jnp.floating) for one in (a, b)):
        return _integer_power(a, b)
    if isinstance(b, float) and b in _ROOTS and a.dtype != jnp.float16:
        return _ROOTS[b](floating(a))
    whole = isinstance(b, int) or (isinstance(b, float) and b.is_integer())
    if whole and 0 < b < 8 and isinstance(a, jax.Array):
        return lax.integer_pow(widened(a), int(b))
    return jnp.power(widened(a), widened(b))
