"""Linear layers of a mixture of experts: rows sorted by expert, each times its expert's weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .form import Form, is_int8
from .linear import linear
from .varying import varying_like

_FEW = 4
"""Up to this many rows per expert, rows are multiplied one by one, each with its own expert's weight."""
_LEAST = 4
"""XLA's int8 product of fewer rows is 20 times slower on a CPU."""
Own = Any
"""A pytree of what belongs to one expert; with a first dimension E, of all."""


def experts(
    x: Array, data: Array, scale: Array, zero: Array | None, bias: Array | None, sums: Array | None,
    mask: Array | None, x_scale: Array | None, x_zero: Array | None, factor: Array | None, ends: Array, *, form: Form,
) -> Array:  # fmt: skip
    """`linear` with the weights of E experts: arrays of weight and bias have a first dimension E.

    ``ends``: see `by_experts`. ``x_scale``, ``x_zero``: ``(1,)``.
    """

    def multiply(rows: Array, own: Own) -> Array:
        count = rows.shape[0]
        if is_int8(form.activation) and not form.rows and count < _LEAST:
            rows = jnp.pad(rows, ((0, _LEAST - count), (0, 0)))
        codes, s, z, added, own_sums, own_factor = own
        y = linear(rows, codes, s, z, added, own_sums, mask, x_scale, x_zero, factor=own_factor, form=form)
        return y[:count]

    return by_experts(multiply, x, ends, (data, scale, zero, bias, sums, factor))


def by_experts(multiply: Callable[[Array, Own], Array], x: Array, ends: Array, parts: Own) -> Array:
    """Rows x ``(T, K)``, sorted by expert, each by ``multiply(rows, own)``; rows after the last end give 0.

    ``ends``: ``(E,)`` integers, the end of each expert's rows. ``multiply``: rows ``(M, K)`` to ``(M, N)``.
    """
    rows, experts = x.shape[0], ends.shape[0]
    expert = expert_of_rows(rows, ends)
    if rows <= _FEW * experts:
        return _row_by_row(multiply, x, expert, parts, experts)

    def step(y: Array, part: tuple[Array, Own]) -> tuple[Array, None]:
        number, own = part
        return jnp.where((expert == number)[:, None], multiply(x, own), y), None

    result = jax.eval_shape(multiply, x, jax.tree.map(lambda part: part[0], parts))
    start = varying_like(jnp.zeros(result.shape, result.dtype), x, ends, parts)
    y: Array = lax.scan(step, start, (lax.iota(jnp.int32, experts), parts))[0]
    return y


def expert_of_rows(rows: int, ends: Array) -> Array:
    """The expert of each row, E for none."""
    return jnp.sum(lax.iota(jnp.int32, rows)[:, None] >= ends[None, :].astype(jnp.int32), axis=1)


def _row_by_row(multiply: Callable[[Array, Own], Array], x: Array, expert: Array, parts: Own, experts: int) -> Array:
    def one(part: tuple[Array, Array]) -> Array:
        row, number = part
        at = jnp.minimum(number, experts - 1)
        own = jax.tree.map(lambda stacked: lax.dynamic_index_in_dim(stacked, at, 0, keepdims=False), parts)
        y = multiply(row[None], own)[0]
        return jnp.where(number < experts, y, jnp.zeros((), y.dtype))

    y: Array = lax.map(one, (x, expert))
    return y
