"""``y = W[indices]`` with W of 8 or 4 bits: gathers the requested rows and dequantizes only those."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from ..codes import coded, length, planes, times_global
from .form import Form


def embedding(
    indices: Array, data: Array, scale: Array, zero: Array | None, factor: Array | None = None, *, form: Form
) -> Array:
    """Rows of a table: indices ``(n,)`` int32 in ``0..V-1`` to ``(n, D)``.

    ``data``: codes as in `codes`, ``(V, D)``. ``scale``, ``zero``: ``(V, G)``; zero int8 is subtracted from codes, a
    float is added to ``q * s``. ``factor``: the global scale ``(1, 1)``, if there is one.
    """
    rows = planes(coded(_taken(data, indices), form.encoding), 1, jnp.dtype(jnp.float32))
    values: Array = rows.reshape(indices.shape[0], scale.shape[1], length(data, 1) // scale.shape[1])
    s = times_global(_taken(scale, indices), factor, form.encoding).astype(jnp.float32)[:, :, None]
    if zero is not None:
        z = _taken(zero, indices).astype(jnp.float32)[:, :, None]
        values = (values - z) * s if zero.dtype == jnp.int8 else values * s + z
    else:
        values = values * s
    return values.reshape(indices.shape[0], length(data, 1)).astype(form.out_dtype)


_LANES = 128
"""Bytes in a row of a TPU's registers: narrower or ragged tables have another layout, which is sliced in place."""


def _taken(table: Any, indices: Array) -> Any:
    # For a single row TPU compilers slice, and give the whole table of bytes another layout first: 65 MB for one row of
    # (32000, 2048). From two rows on they gather.
    if indices.shape[0] == 1 and table.dtype.itemsize == 1 and table.shape[1] % _LANES == 0:
        return _taken(table, jnp.repeat(indices, 2))[:1]
    # Indices have been checked; the mode only avoids the comparison.
    return jnp.take(table, indices, axis=0, mode="clip")
