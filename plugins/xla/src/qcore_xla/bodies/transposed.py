"""The transpose of a product of floats, for gradients: ``dx = dy @ W``, with W dequantized slice by slice.

JAX would derive it, and keep a dequantized weight for it.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..codes import Codes, coded, planes, times_global
from .form import Form
from .linear import added_by_zero, contract


def transposed(
    dy: Array, data: Array, scale: Array, zero: Array | None, factor: Array | None = None, *, form: Form
) -> Array:
    """``dy @ W`` for dy ``(M, N)``, giving float32 ``(M, columns of data)``; the rest as for `linear.linear`."""
    wide, s = times_global(dy, factor, form.encoding).astype(jnp.float32), scale.astype(jnp.float32)
    groups, codes = scale.shape[0], coded(data, form.encoding)
    if data.ndim == 2:
        dx = _rows(wide * s[0], codes)
    elif form.rows:
        dx = _rows(wide, codes, s)
    else:
        dx = _slices(wide, codes, s)
    if zero is None:
        return dx
    each = contract(wide, added_by_zero(s, zero), (1,), (1,))  # (M, G)
    return (dx.reshape(dx.shape[0], groups, -1) + each[:, :, None]).reshape(dx.shape)


def grouped_transposed(
    dy: Array, data: Array, scale: Array, zero: Array | None, factor: Array | None = None, *, form: Form
) -> Array:
    """`transposed` for channel groups: dy ``(H, M, N)``."""
    axes = (0, 0, 0, *(None if part is None else 0 for part in (zero, factor)))
    dx: Array = jax.vmap(partial(transposed, form=form), in_axes=axes)(dy, data, scale, zero, factor)
    return dx


def _rows(dy: Array, data: Codes, scale: Array | None = None) -> Array:
    """Data ``(N, K)`` or, with scales, ``(N, S, b)``."""
    w = planes(data, data.ndim - 1, jnp.dtype(jnp.float32)).reshape(data.shape[0], -1)
    if scale is not None:
        w = w * jnp.repeat(scale.T, w.shape[1] // scale.shape[0], axis=1)
    return contract(dy, w, (1,), (0,))


def _slices(dy: Array, data: Codes, scale: Array) -> Array:
    """Data ``(S, b, N)``, one slice after another."""
    each = data.shape[0] // scale.shape[0]

    def step(_: None, part: tuple[Codes, Array]) -> tuple[None, Array]:
        codes, number = part
        w = planes(codes, 0, jnp.dtype(jnp.float32)).reshape(-1, codes.shape[-1])
        return None, contract(dy * scale[number // each], w, (1,), (1,))

    found = lax.scan(step, None, (data, lax.iota(jnp.int32, data.shape[0])))[1]  # (S, M, b)
    return jnp.moveaxis(found, 0, 1).reshape(dy.shape[0], -1)
