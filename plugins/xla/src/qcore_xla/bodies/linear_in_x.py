"""The product of float activations as a primitive of JAX that is linear in x: its gradients keep no dequantized weight.

JAX would derive the transpose from the product's slices, and keep all of them dequantized for it.
`jax.custom_derivatives.linear_call` cannot be batched, and `jax.custom_vjp` has no forward mode. So the primitive has
rules of its own: `jvp`, `vjp` and `vmap` of it, nested in any order, are the same primitive again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .form import Form
from .linear import grouped, linear
from .transposed import grouped_transposed, transposed
from .varying import varying_like

Parts = tuple[Array | None, ...]
"""Data, scale, zero and factor, as `linear.linear` takes them."""


@dataclass(frozen=True)
class _Product:
    """What is static: ``back``: whether dy is taken to dx.

    ``columns``, ``dtype``: of x. ``there``: which of the parts there are. ``batched``: for each `jax.vmap` around the
    product, the outermost first, which of these have its dimension; x always has it.
    """

    form: Form
    there: tuple[bool, ...]
    columns: int
    dtype: Any
    back: bool = False
    batched: tuple[tuple[bool, ...], ...] = ()

    def __call__(self, x: Array, *given: Array) -> Array:
        run: Callable[..., Array] = self._alone
        for axes in reversed(self.batched):
            run = jax.vmap(run, in_axes=(0, *(0 if one else None for one in axes)))
        # The bodies rely on rank promotion; the user's program, which may forbid it, has been traced before.
        with jax.numpy_rank_promotion("allow"):
            return run(x, *given)

    def _alone(self, x: Array, *given: Array) -> Array:
        left = iter(given)
        data, scale, zero, factor = (next(left) if there else None for there in self.there)
        assert data is not None
        assert scale is not None
        if self.back:
            body = grouped_transposed if x.ndim == 3 else transposed
            return body(x, data, scale, zero, factor, form=self.form)[..., : self.columns].astype(self.dtype)
        forward = grouped if x.ndim == 3 else linear
        return forward(x, data, scale, zero, None, factor=factor, form=self.form)


def product(x: Array, parts: Parts, form: Form) -> Array:
    """The product of floats x ``(M, K)``, or ``(H, M, K)`` for channel groups, without activation and bias."""
    given = [part for part in parts if part is not None]
    made = _Product(form, tuple(part is not None for part in parts), x.shape[-1], x.dtype)
    return _bind(made, x, *given)


def _bind(of: _Product, x: Array, *given: Array) -> Array:
    y: Array = _linear.bind(varying_like(x, *given), *given, of=of)
    return y


@partial(jax.jit, static_argnames="of")
def _run(x: Array, *given: Array, of: _Product) -> Array:
    return of(x, *given)


def _abstract(x: Any, *given: Any, of: _Product) -> Any:
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (x, *given)]
    made = jax.eval_shape(of, *shapes)
    return x.update(shape=made.shape, dtype=made.dtype, weak_type=False)


def _jvp(primals: Any, tangents: Any, *, of: _Product) -> tuple[Array, Any]:
    x, *given = primals
    y = _bind(of, x, *given)
    if isinstance(tangents[0], ad.Zero):
        return y, varying_like(jnp.zeros_like(y), y)
    return y, _bind(of, tangents[0], *given)


def _transpose(dy: Any, x: Any, *given: Any, of: _Product) -> list[Any]:
    if isinstance(dy, ad.Zero):
        return [ad.Zero(x.aval), *[None] * len(given)]
    return [_bind(replace(of, back=not of.back), dy, *given), *[None] * len(given)]


def _batch(arguments: Any, at: Any, *, of: _Product) -> tuple[Array, int]:
    size = next(one.shape[axis] for one, axis in zip(arguments, at, strict=True) if axis is not None)
    x, *given = (one if axis is None else jnp.moveaxis(one, axis, 0) for one, axis in zip(arguments, at, strict=True))
    if at[0] is None:
        x = jnp.broadcast_to(x, (size, *x.shape))
    batched = (tuple(axis is not None for axis in at[1:]), *of.batched)
    return _bind(replace(of, batched=batched), x, *given), 0


_linear = Primitive("qcore_linear_in_x")
_linear.def_impl(_run)
_linear.def_abstract_eval(_abstract)
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(lambda x, *given, of: of(x, *given), multiple_results=False))
