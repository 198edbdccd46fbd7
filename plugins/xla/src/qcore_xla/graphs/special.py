"""Rules for one platform, in the place of those of `rules`, where XLA's compiler for it does badly with the general."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from .attention import attention_on_gpu
from .rules import RULES, rows_of


def _index_copy_on_cpu(x: Any, dim: int, index: Any, source: Any) -> Any:
    """One row is written in a loop of one turn.

    XLA:CPU fuses a plain write into each of its readers, and copies the whole cache for each of them, and for the
    result. A loop is not fused, and updates what it carries in place. That it ends after one turn must not be known at
    compile time: XLA would take it apart.
    """
    if index.size != 1 or not x.ndim:
        return RULES["index_copy"](x, dim, index, source)
    size, source = x.shape[dim], rows_of(x, dim, index, source)

    def write(turn: tuple[Any, Any]) -> tuple[Any, Any]:
        at, values = turn
        starts: list[Any] = [jnp.int32(0)] * x.ndim
        starts[dim] = at
        return jnp.full_like(at, size), lax.dynamic_update_slice(values, source, starts)

    first = index.reshape(()).astype(jnp.int32)
    return lax.while_loop(lambda turn: turn[0] < size, write, (first, x))[1]


SPECIAL: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "cpu": {"index_copy": _index_copy_on_cpu},
    "cuda": {"qcore_graph.attention": attention_on_gpu},
}
"""By type of torch device, then by name of the op."""
