"""The ops as pure functions of arrays and `PackedWeight`: under `jit`, `vmap`, `grad` with respect to x, `shard_map`.

The gradient with respect to x is that of the product with the dequantized weight; quantized activations let it through
unchanged. The weight is dequantized anew for it, slice by slice as in the product, not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array
from jax.custom_derivatives import SymbolicZero

from qcore import FormatError

from ..bodies.experts import expert_of_rows
from ..bodies.varying import varying_like
from ..graphs import quantized
from ..graphs.quantized import Arrays, Layer
from . import checks
from .explicit import sharded_as
from .weights import PackedWeight

Pair = int | Sequence[int]


def linear(x: Any, weight: PackedWeight, bias: Any = None) -> Array:
    """``A(x) @ W^T + bias`` for x ``(..., K)`` float32, bfloat16 or float16, giving ``(..., N)`` in the dtype of x.

    A scheme with int8 results gives int8. ``bias``: ``(N,)`` or None. Raises `FormatError` for wrong shapes or dtypes.
    """
    checks.kind(weight, "linear")
    x = jnp.asarray(x)
    checks.columns(x, weight)
    call = _Call("linear", weight.layer, checks.float_dtype(x))
    return call.run(x, weight, checks.bias(bias, weight), kept=x.ndim - 1)


def embedding(indices: Any, weight: PackedWeight, *, dtype: Any = jnp.float32) -> Array:
    """Rows of a table ``(V, D)``: indices of any shape and integer dtype to ``(*indices.shape, D)`` of ``dtype``.

    As everywhere in JAX, a negative index counts from the end, and no error is raised for an index out of range: the
    nearest row is taken.
    """
    checks.kind(weight, "embedding")
    rows = checks.row_numbers(jnp.asarray(indices), weight)
    out = checks.torch_dtype(dtype)

    def run(rows: Array, arrays: Arrays) -> Array:
        return quantized.gathered(rows, arrays, weight.layer, out).astype(dtype)

    return sharded_as(run, rows, weight.arrays, kept=rows.ndim)


def conv2d(
    x: Any, weight: PackedWeight, bias: Any = None, *, kernel_size: Pair, stride: Pair = 1, padding: Pair = 0,
    dilation: Pair = 1,
) -> Array:  # fmt: skip
    """A convolution of x ``(B, IC, H, W)``, giving ``(B, OC, OH, OW)`` in the dtype of x.

    ``weight``: ``(OC, KH * KW * IC / groups)``, columns in the order (KH, KW, IC), which is how qcore stores
    convolutions; ``groups`` belong to the weight: see `qcore_xla.pack`. Raises `FormatError` for wrong shapes.
    """
    checks.kind(weight, "linear", "conv2d")
    x = jnp.asarray(x)
    geometry = checks.geometry(x, weight, kernel_size, stride, padding, dilation)
    call = _Call("conv2d", weight.layer, checks.float_dtype(x), geometry)
    return call.run(x, weight, checks.bias(bias, weight), kept=1, added=3)


def grouped_linear(x: Any, offsets: Any, weight: PackedWeight, bias: Any = None) -> Array:
    """Rows of x ``(T, K)``, sorted by expert, each times its expert's weight of ``(E, N, K)``, giving ``(T, N)``.

    ``offsets``: int32 ``(E,)``, the end of each expert's rows; rows after the last end give 0. ``bias``: ``(E, N)``.
    """
    checks.kind(weight, "grouped_linear")
    x, offsets = jnp.asarray(x), jnp.asarray(offsets)
    checks.columns(x, weight)
    checks.offsets(x, offsets, weight)
    call = _Call("grouped_linear", weight.layer, checks.float_dtype(x))
    return call.run(x, weight, checks.bias(bias, weight), offsets, kept=1)


@dataclass(frozen=True)
class _Call:
    """What is static in a product."""

    kind: str
    layer: Layer
    dtype: Any
    geometry: tuple[tuple[int, int], ...] = ()

    def run(self, x: Array, weight: PackedWeight, bias: Any, ends: Any = None, *, kept: int, added: int = 1) -> Array:
        """The product with its derivatives; ``kept``, ``added``: see `sharded_as`."""
        return sharded_as(partial(_run, self), x, weight.arrays, bias, ends, kept=kept, added=added)

    def __call__(self, x: Array, arrays: Arrays, bias: Any, ends: Any) -> Array:
        # The bodies rely on rank promotion; the user's program may forbid it.
        with jax.numpy_rank_promotion("allow"):
            y = self._product(x, arrays, bias, ends)
        return y if self.layer.scheme.output is not None else y.astype(self.dtype)

    def _product(self, x: Array, arrays: Arrays, bias: Any, ends: Any) -> Array:
        out = torch.int8 if self.layer.scheme.output is not None else checks.torch_dtype(self.dtype)
        if self.kind == "conv2d":
            return quantized.convolved(x, arrays, bias, self.layer, out, *self.geometry)
        if self.kind == "grouped_linear":
            return quantized.experts(x, jnp.asarray(ends), arrays, bias, self.layer, out)
        return quantized.dense_rows(x, arrays, bias, self.layer, out)

    def spread(self, bias: Array, shape: tuple[int, ...], ends: Any) -> Array:
        """A tangent of the bias, as the bias is added to results of a shape."""
        if self.kind == "grouped_linear":
            expert = expert_of_rows(shape[0], ends)[:, None]
            return jnp.where(expert < bias.shape[0], jnp.take(bias, expert[:, 0], axis=0, mode="clip"), 0)
        return jnp.broadcast_to(bias[:, None, None] if self.kind == "conv2d" else bias, shape)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(call: _Call, x: Array, arrays: Arrays, bias: Any, ends: Any) -> Array:
    return call(x, arrays, bias, ends)


@partial(_run.defjvp, symbolic_zeros=True)
def _jvp(call: _Call, primals: Any, tangents: Any) -> tuple[Array, Array]:
    if call.layer.scheme.output is not None:
        raise FormatError(f"{call.layer.scheme}: int8 results have no gradient.")
    x, arrays, bias, ends = primals
    dx, _, dbias, _ = tangents  # a packed weight has no gradient
    y = call(x, arrays, bias, ends)
    dy = jnp.zeros(y.shape, jnp.float32)
    if not isinstance(dx, SymbolicZero):
        dy = replace(call, layer=replace(call.layer, straight=True))(dx, arrays, None, ends).astype(dy.dtype)
    if bias is not None and not isinstance(dbias, SymbolicZero):
        dy = dy + call.spread(dbias.astype(dy.dtype), y.shape, ends)  # its gradient is a sum of float32
    return y, varying_like(dy.astype(y.dtype), y)
