"""Axes of a mesh over which arrays vary inside `jax.shard_map`, where JAX checks them (``check_vma``, its default)."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array, lax


def varying_like(x: Array, *others: Any) -> Array:
    """X as an array that varies as the arrays of others do, which what a loop starts with has to."""
    there = frozenset().union(*map(_axes, jax.tree.leaves(others)))
    missing = tuple(sorted(there - _axes(x)))
    if not missing:
        return x
    # pcast is the new name of pvary
    y: Array = lax.pcast(x, missing, to="varying") if hasattr(lax, "pcast") else getattr(lax, "pvary")(x, missing)  # noqa: B009
    return y


def _axes(x: Any) -> frozenset[Any]:
    kind = jax.typeof(x)  # has an attribute `mat` in JAX 0.10, and `vma` before
    found: frozenset[Any] = kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())
    return found
