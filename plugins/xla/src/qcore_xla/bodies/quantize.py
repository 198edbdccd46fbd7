"""Activations to int8 codes or numbers of fp8, results to int8 codes, by the rules of `qcore.weights.activations`.

Everything is computed in float32.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from . import extremes
from .form import Activation

_SMALLEST = 2.0**-126
"""The smallest normal number of float32."""
_LARGEST_FP8, _SMALLEST_FP8, _STEPS_FP8 = 448.0, 2.0**-6, 2.0**9
"""Of e4m3fn: the largest number, the smallest normal one, and how many numbers there are per 1 below that."""
_MANTISSA_FP8 = 3


def activations(
    x: Array, kind: Activation, scale: Array | None, zero: Array | None, groups: int = 1, axis: str = ""
) -> tuple[Array, Array | None, Array | None]:
    """Quantize x ``(M, K)``: codes, scale ``(M, 1)`` and zero point ``(M, 1)``, float32; None if there is none.

    Codes are int8, or numbers of e4m3 in the dtype of x, which holds them exactly.
    ``scale`` and ``zero`` ``(M,)`` or ``(1,)``: the parameters of the kinds "given" and "fp8-given". An x of int8 holds
    codes already. ``groups``: scales of a token of the kind "fp8-groups", ``(M, groups)``. ``axis``: of the mesh over
    whose devices a token is spread.
    """
    if kind == "float":
        return x, None, None
    if kind == "fp8-given":
        assert scale is not None
        s = _column(scale)
        return _e4m3(x.astype(jnp.float32) / s).astype(x.dtype), s, None
    if kind in {"fp8", "fp8-groups"}:
        shared = kind == "fp8"
        parts = x.astype(jnp.float32).reshape(x.shape[0], 1 if shared else groups, -1)
        largest = extremes.largest_magnitude(parts, -1, over=axis if shared else "")
        s = _usable(largest / _LARGEST_FP8)
        return _e4m3(parts / s[:, :, None]).reshape(x.shape).astype(x.dtype), s, None
    if kind == "given":
        assert scale is not None
        assert zero is not None
        s, z = _column(scale), _column(zero)
        return (x if x.dtype == jnp.int8 else _codes(x, s, z)), s, z
    if kind == "symmetric":
        largest = extremes.largest_magnitude(x, -1, keepdims=True, over=axis)
        s = _usable(largest / 127)
        return _codes(x, s, None), s, None
    low, high = extremes.range_with_zero(x, over=axis)
    s = _usable((high - low) / 255)
    z = jnp.where(high == low, 0.0, jnp.round(-128 - low / s))  # a token of zeros is zeros, whatever follows
    return _codes(x, s, z), s, z


def requantized(y: Array, scale: Array | None, zero: Array | None) -> Array:
    """Float32 y ``(M, N)`` to int8 codes by parameters ``(M,)`` or ``(1,)``."""
    assert scale is not None
    assert zero is not None
    return _codes(y, _column(scale), _column(zero))


def _e4m3(x: Array) -> Array:
    """The nearest numbers of e4m3fn, half to even, saturating: float32, since not every XLA rounds to fp8 once."""
    x = jnp.clip(x, -_LARGEST_FP8, _LARGEST_FP8)
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=_MANTISSA_FP8)
    return jnp.where(jnp.abs(x) < _SMALLEST_FP8, jnp.round(x * _STEPS_FP8) / _STEPS_FP8, normal)


def _codes(x: Array, scale: Array, zero: Array | None) -> Array:
    steps = jnp.round(x.astype(jnp.float32) / scale)  # half to even
    if zero is not None:
        steps = steps + zero
    return jnp.clip(steps, -128, 127).astype(jnp.int8)


def _column(parameter: Array) -> Array:
    return lax.expand_dims(parameter.astype(jnp.float32), (1,))


def _usable(scale: Any) -> Array:
    # NaN passes through: a token that holds NaN must give NaN, not a number.
    return jnp.where(scale == 0, 1.0, jnp.maximum(scale, _SMALLEST)).astype(jnp.float32)
