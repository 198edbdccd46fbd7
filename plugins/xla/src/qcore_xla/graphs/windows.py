"""Rules of ops over windows (pools, strided views), of running products, instance norm and sorted tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..bodies.extremes import largest
from .rules import RULES, rule, widened


def _each(values: Any, dims: int) -> list[int]:
    given = [values] if isinstance(values, int) else list(values)
    return given * dims if len(given) == 1 else given


def _ends(size: int, window: int, step: int, pad: int, ceil_mode: bool) -> int:
    """Elements to pad at the end, beside ``pad``, so that windows that are cut off by the end count."""
    if not ceil_mode:
        return 0
    count = -(-(size + 2 * pad - window) // step) + 1
    if (count - 1) * step >= size + pad:  # the last window would begin in the padding
        count -= 1
    return max(0, (count - 1) * step + window - size - 2 * pad)


def _pool(
    x: Any, start: Any, function: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, dims: int
) -> Any:
    kernel, pad, dilation = _each(kernel, dims), _each(padding, dims), _each(dilation, dims)
    stride = _each(stride, dims) if stride else kernel
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    ends = [_ends(*one, ceil_mode) for one in zip(x.shape[-dims:], spans, stride, pad, strict=True)]
    lead = (1,) * (x.ndim - dims)
    pads = [(0, 0)] * (x.ndim - dims) + [(p, p + end) for p, end in zip(pad, ends, strict=True)]
    return lax.reduce_window(
        x, start, function, (*lead, *kernel), (*lead, *stride), pads, window_dilation=(*lead, *dilation)
    )


def _max_pool(
    x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False, *, dims: int
) -> tuple[Any, None]:
    least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else int(np.iinfo(np.dtype(x.dtype)).min)
    # A maximum of NumPy's kind: NaN wins, as in torch.
    y = _pool(x, jnp.asarray(least, x.dtype), jnp.maximum, kernel, stride, padding, dilation, ceil_mode, dims)
    return y, None


def _avg_pool(
    x: Any, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False, count_include_pad: bool = True,
    divisor: Any = None, *, dims: int,
) -> Any:  # fmt: skip
    def total(of: Any, pad: Any) -> Any:
        return _pool(of, 0.0, lax.add, kernel, stride, pad, 1, ceil_mode, dims)

    y = total(x.astype(jnp.float32), padding)
    if divisor is not None:
        return y / divisor
    ones = jnp.ones(x.shape, jnp.float32)
    if not count_include_pad:
        return y / total(ones, padding)
    # Padding counts, but not what `ceil_mode` adds behind it.
    pads = [(0, 0, 0)] * (x.ndim - dims) + [(p, p, 0) for p in _each(padding, dims)]
    kept = lax.pad(ones, jnp.ones((), jnp.float32), pads)
    steps = stride or kernel
    counts = _pool(kept, 0.0, lax.add, kernel, steps, 0, 1, ceil_mode, dims)
    return y / counts[tuple(slice(0, size) for size in y.shape)]


for _dims in (2, 3):
    RULES[f"max_pool{_dims}d_with_indices"] = partial(_max_pool, dims=_dims)
    RULES[f"avg_pool{_dims}d"] = partial(_avg_pool, dims=_dims)


def _means(x: Any, count: int, axis: int) -> Any:
    """Means of ``count`` windows of adaptive pooling; one at a time, as a product would spread NaN over all of them."""
    size = x.shape[axis]
    ends = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
    return jnp.stack([lax.slice_in_dim(x, *end, axis=axis).mean(axis) for end in ends], axis)


@rule("_adaptive_avg_pool2d")
def _adaptive_avg_pool2d(x: Any, size: Sequence[int]) -> Any:
    return _means(_means(x.astype(jnp.float32), size[0], x.ndim - 2), size[1], x.ndim - 1)


@rule("adaptive_max_pool2d")
def _adaptive_max_pool2d(x: Any, size: Sequence[int]) -> tuple[Any, None]:
    height, width = x.shape[-2] // size[0], x.shape[-1] // size[1]
    return largest(x.reshape(*x.shape[:-2], size[0], height, size[1], width), axis=(-3, -1)), None


@rule("as_strided")
def _as_strided(x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """Of a tensor that lies in memory in order."""
    places = jnp.full(tuple(size), offset or 0, jnp.int32)
    for dim, step in enumerate(stride):
        places = places + step * lax.broadcasted_iota(jnp.int32, tuple(size), dim)
    return x.reshape(-1)[places]


@rule("_native_batch_norm_legit")
def _instance_norm(x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    """With the statistics of x itself."""
    del training, momentum
    axes, shape = (0, *range(2, x.ndim)), (1, -1) + (1,) * (x.ndim - 2)
    wide = x.astype(jnp.float32)
    mean, var = jnp.mean(wide, axes, keepdims=True), jnp.var(wide, axes, keepdims=True)
    scale = lax.rsqrt(var + eps)
    y = (wide - mean) * scale
    y = y if weight is None else y * weight.reshape(shape)
    return (y if bias is None else y + bias.reshape(shape)), mean.reshape(-1), scale.reshape(-1)


@rule("unfold")
def _unfold(x: Any, dim: int, size: int, step: int) -> Any:
    if not x.ndim:
        return jnp.broadcast_to(x, (size,))
    starts = jnp.arange(0, x.shape[dim] - size + 1, step)
    picked = jnp.take(x, starts[:, None] + jnp.arange(size), axis=dim)
    return jnp.moveaxis(picked, dim % x.ndim + 1, -1)


@rule("diagonal")
def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return jnp.diagonal(x, offset, dim1, dim2)


@rule("cumprod")
def _cumprod(x: Any, dim: int, **_: Any) -> Any:
    wide = x.astype(jnp.float32)
    return jnp.cumprod(wide, axis=dim) if x.ndim else wide


@rule("logcumsumexp")
def _logcumsumexp(x: Any, dim: int) -> Any:
    return lax.cumlogsumexp(x.astype(jnp.float32), axis=dim % x.ndim) if x.ndim else x


@rule("var_mean")
def _var_mean(x: Any, dim: Any = None, *, keepdim: bool = False, **kwargs: Any) -> Any:
    return RULES["var"](x, dim, keepdim=keepdim, **kwargs), RULES["mean"](x, dim, keepdim)


def _found(table: Any, x: Any, right: bool) -> Any:
    if table.ndim == 1:
        return jnp.searchsorted(table, x, side="right" if right else "left")
    # Not the opposite comparison: NaN comes last.
    behind = table[..., None, :] > x[..., None] if right else table[..., None, :] >= x[..., None]
    return jnp.sum(~behind, axis=-1, dtype=jnp.int32)


@rule("searchsorted")
def _searchsorted(table: Any, x: Any, *, right: bool = False, side: str | None = None, **_: Any) -> Any:
    wide = jnp.result_type(table, x)
    return _found(table.astype(wide), jnp.asarray(x, wide), right or side == "right")


@rule("bucketize")
def _bucketize(x: Any, table: Any, *, right: bool = False, **_: Any) -> Any:
    return _searchsorted(table, x, right=right)


_SCATTERS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda at: at.add, "mean": lambda at: at.add, "prod": lambda at: at.multiply, "amax": lambda at: at.max,
    "amin": lambda at: at.min,
}  # fmt: skip
_STARTS = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -np.inf, "amin": np.inf}


@rule("scatter_reduce")
def _scatter_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    places: list[Any] = list(jnp.meshgrid(*(jnp.arange(size) for size in index.shape), indexing="ij"))
    places[dim % x.ndim] = index
    at = tuple(places)
    x = widened(x)
    source = source[tuple(slice(0, size) for size in index.shape)].astype(x.dtype)
    start = x if include_self else x.at[at].set(_STARTS[reduce])
    y = _SCATTERS[reduce](start.at[at])(source)
    if reduce != "mean":
        return y
    counts = jnp.full(x.shape, float(include_self)).at[at].add(1.0)
    return y / jnp.maximum(counts, 1.0)
