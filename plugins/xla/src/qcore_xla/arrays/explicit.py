"""Meshes with axes of type Explicit, which `jax.make_mesh` gives: there each op has to name its result's sharding.

The bodies leave that to XLA, and so run with axes of type Auto.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec


def sharded_as(run: Callable[..., Array], x: Array, *others: Any, kept: int, added: int = 1) -> Array:
    """``run(x, *others)``, sharded as the first ``kept`` dimensions of x, with ``added`` whole dimensions behind them.

    Without axes of type Explicit XLA decides.
    """
    mesh = _explicit_mesh((x, others))
    if mesh is None:
        return run(x, *others)
    spec = tuple(jax.typeof(x).sharding.spec)[:kept]
    where = NamedSharding(mesh, PartitionSpec(*spec, *[None] * added))
    y: Array = jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=where)(x, *others)
    return y


def _explicit_mesh(arrays: Any) -> Any:
    """The current mesh or, without one, that of an array, if it has axes of type Explicit; else None."""
    if not hasattr(jax.sharding, "auto_axes"):  # JAX before the type of meshes that make_mesh gives
        return None
    current = jax.sharding.get_abstract_mesh()
    meshes = [current] if not current.empty else [jax.typeof(one).sharding.mesh for one in jax.tree.leaves(arrays)]
    return next((mesh for mesh in meshes if getattr(mesh, "explicit_axes", ())), None)
