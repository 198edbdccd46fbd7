"""Integers that need more than 32 bits, in which programs compute what torch computes in 64.

Token ids, positions and lengths fit. Hashes and large products do not: the program notes it, and the call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array
from torch import Tensor, fx

from .rules import RULES

_LIMIT = 2.0**31
_BOUND = _LIMIT * (1 - 2.0**-16)
"""For bounds computed in float32, whose rounding must not hide an overflow."""


def overflow(name: str, node: fx.Node, args: Sequence[Any]) -> Array | None:
    """Whether a result of 64 bits does not fit 32; None if the op cannot overflow.

    ``name``: of the op in `RULES`; ``args``: arrays in the place of tensors. Sums and differences of two are checked
    exactly. A product, a power or a sum of many counts as too large from 2^15 below the limit on, and a sum of many by
    its magnitudes.
    """
    like = node.meta.get("val")
    if not isinstance(like, Tensor) or like.dtype != torch.int64:
        return None
    if name == "_to_copy":
        return _finite_beyond(args[0]) if jnp.issubdtype(args[0].dtype, jnp.floating) else None
    check = _CHECKS.get(name)
    return None if check is None else check(name, args, dict(node.kwargs))


def _finite_beyond(x: Any) -> Array:
    """False for NaN and infinities, whose conversion torch leaves undefined: models select among others afterwards."""
    return jnp.any((jnp.abs(x) >= _LIMIT) & ~jnp.isinf(x))


def _beyond(x: Any, limit: float) -> Array:
    return jnp.any(jnp.abs(x) >= limit)


def _float(x: Any) -> Array:
    """Magnitudes in float32."""
    return jnp.abs(jnp.asarray(x, jnp.float32))


def _of_arrays(name: str, args: Sequence[Any], kwargs: Any) -> Array:
    """For ops whose result is at most that of the magnitudes of their arrays; other arguments stay as they are."""
    arrays = [_float(x) if isinstance(x, jax.Array) else x for x in args]
    factors = {key: abs(value) for key, value in kwargs.items() if key != "dtype"}
    return _beyond(RULES[name](*arrays, **factors), _BOUND)


def _of_two(name: str, args: Sequence[Any], _kwargs: Any) -> Array:
    """The same for ops of two arrays or numbers."""
    first, second = _float(args[0]), _float(args[1])
    if name == "pow":  # a negative power is no large number
        second = jnp.where(jnp.asarray(args[1], jnp.float32) < 0, 0, second)
    return _beyond(RULES[name](first, second), _BOUND)


def _sum_of_two(name: str, args: Sequence[Any], kwargs: Any) -> Array:
    alpha = kwargs.get("alpha", 1)
    first, second = jnp.asarray(args[0], jnp.int32), jnp.asarray(args[1], jnp.int32) * alpha
    total = first + second if name == "add" else first - second
    signs = second if name == "add" else ~second
    wrapped = jnp.any(((first ^ total) & (signs ^ total)) < 0)
    return wrapped if alpha == 1 else wrapped | _beyond(_float(args[1]) * abs(alpha), _BOUND)


def _lowest(_name: str, args: Sequence[Any], _kwargs: Any) -> Array:
    return jnp.any(args[0] == -(1 << 31))  # has no opposite


def _collected(_name: str, args: Sequence[Any], _kwargs: Any) -> Array | None:
    """For ops that add many numbers to one place of a tensor: scatter_add, and index_put if it accumulates."""
    if isinstance(args[1], int):
        source = args[3]
    elif len(args) > 3 and args[3]:
        source = args[2]
    else:
        return None
    return _beyond(jnp.max(_float(args[0]), initial=0.0) + jnp.sum(_float(source)), _BOUND)


_CHECKS: dict[str, Callable[[str, Sequence[Any], Any], Array | None]] = {
    **dict.fromkeys(("sum", "prod", "cumsum", "mm", "bmm", "addmm"), _of_arrays),
    **dict.fromkeys(("mul", "pow"), _of_two),
    **dict.fromkeys(("add", "sub"), _sum_of_two),
    **dict.fromkeys(("neg", "abs"), _lowest),
    **dict.fromkeys(("scatter_add", "index_put"), _collected),
}
