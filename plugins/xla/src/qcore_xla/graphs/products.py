"""Products, attention, softmax and norms in floats as functions of JAX arrays: products accumulate in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .rules import RULES, rule, widened


def _precision(x: Any) -> Any:
    # Otherwise an accelerator would round float32 operands to fewer bits.
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _dot(a: Any, b: Any, contracting: Any, batch: Any = ((), ())) -> Any:
    wide = jnp.float32 if jnp.issubdtype(a.dtype, jnp.floating) else jnp.int32
    return lax.dot_general(a, b, (contracting, batch), precision=_precision(a), preferred_element_type=wide)


RULES["mm"] = lambda a, b: _dot(a, b, ((1,), (0,)))
RULES["bmm"] = lambda a, b: _dot(a, b, ((2,), (1,)), ((0,), (0,)))


@rule("addmm")
def _addmm(x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    y = _dot(a, b, ((1,), (0,)))
    y = y if alpha == 1 else y * alpha
    return y if beta == 0 else y + (x if beta == 1 else x * beta)


@rule("qcore_graph.dense")
def dense(x: Any, weight: Any, bias: Any = None) -> Any:
    """``x @ weight^T + bias``."""
    y = _dot(x, weight, ((x.ndim - 1,), (1,)))
    return y if bias is None else y + bias.astype(y.dtype)


@rule("qcore_graph.attention")
def attention(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None) -> Any:
    """See `qcore.graphs.ops`; heads that share keys are multiplied together, so that keys are read once."""
    batch, heads, length, size = q.shape
    groups, seen = k.shape[1], k.shape[2]
    each = heads // groups
    rows = q.reshape(batch, groups, each * length, size)
    scores = _dot(rows, k, ((3,), (3,)), ((0, 1), (0, 1))) * (size**-0.5 if scale is None else scale)
    scores = scores.reshape(batch, heads, length, seen)
    if is_causal:
        allowed = lax.broadcasted_iota(jnp.int32, (length, seen), 0) >= lax.broadcasted_iota(
            jnp.int32, (length, seen), 1
        )
        scores = jnp.where(allowed, scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + mask.astype(scores.dtype)
    # Rows that see nothing give zeros, as torch's attention does.
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)  # there may be no keys
    shares = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top))
    total = jnp.sum(shares, axis=-1, keepdims=True)
    shares = shares / jnp.where(total == 0, 1.0, total)
    mixed = shares.astype(v.dtype).reshape(batch, groups, each * length, seen)
    return _dot(mixed, v, ((3,), (2,)), ((0, 1), (0, 1))).reshape(batch, heads, length, v.shape[-1])


def _below_top(x: Any, dim: int) -> Any:
    """Differences of x to the largest along a dimension, exactly 0 at the largest.

    XLA:CPU computes ``x * c - top`` with one rounding, also if the ``top`` has two. Where a mask has made all of a row
    about -1e38 that is not 0 but 1e30, and a softmax 0 / 0.
    """
    wide = widened(x)
    top = jnp.max(wide, axis=dim, keepdims=True, initial=-jnp.inf)
    return jnp.where((wide == top) & jnp.isfinite(top), 0.0, wide - top)


@rule("_softmax")
def _softmax(x: Any, dim: int, half_to_float: bool = False) -> Any:
    del half_to_float
    shares = jnp.exp(_below_top(x, dim))
    return shares / jnp.sum(shares, axis=dim, keepdims=True)


@rule("_log_softmax")
def _log_softmax(x: Any, dim: int, half_to_float: bool = False) -> Any:
    del half_to_float
    below = _below_top(x, dim)
    return below - jnp.log(jnp.sum(jnp.exp(below), axis=dim, keepdims=True))


@rule("qcore_graph.rms_norm")
def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """See `qcore.graphs.ops`."""
    wide = x.astype(jnp.float32)
    y = (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)
    return y if weight is None else weight * y


@rule("qcore_graph.layer_norm")
def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """See `qcore.graphs.ops`."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    y = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@rule("qcore_graph.rope")
def rope(x: Any, cos: Any, sin: Any) -> Any:
    """See `qcore.graphs.ops`."""
    half = x.shape[-1] // 2
    return x * cos + jnp.concatenate((-x[..., half:], x[..., :half]), -1) * sin


@rule("embedding")
def embedding(weight: Any, indices: Any, *_rest: Any) -> Any:
    """Rows of a float table."""
    return jnp.take(weight, indices, axis=0, mode="clip")


@rule("convolution")
def convolution(
    x: Any, weight: Any, bias: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> Any:  # fmt: skip
    """A convolution of 1 to 3 dimensions, channels first."""
    dims = x.ndim - 2
    steps, pads, apart, more = (
        list(values) * dims if len(values) == 1 else list(values)
        for values in (stride, padding, dilation, output_padding)
    )
    around, spread = [(p, p) for p in pads], [1] * dims
    if transposed:  # a convolution of x with gaps, by the weight turned round
        spread, steps = steps, [1] * dims
        reach = [d * (size - 1) for d, size in zip(apart, weight.shape[2:], strict=True)]
        around = [(r - p, r - p + o) for r, p, o in zip(reach, pads, more, strict=True)]
        weight = _turned(weight, groups)
    y = lax.conv_general_dilated(
        x, weight, steps, around, lhs_dilation=spread, rhs_dilation=apart, feature_group_count=groups,
        precision=_precision(x), preferred_element_type=jnp.float32,
    )  # fmt: skip
    return y if bias is None else y + bias.reshape((1, -1) + (1,) * dims)


def _turned(weight: Any, groups: int) -> Any:
    """``(IC, OC / groups, ...)`` of a transposed convolution as ``(OC, IC / groups, ...)``, windows back to front."""
    by_group = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    swapped = jnp.swapaxes(by_group, 1, 2).reshape(-1, weight.shape[0] // groups, *weight.shape[2:])
    return jnp.flip(swapped, tuple(range(2, swapped.ndim)))
