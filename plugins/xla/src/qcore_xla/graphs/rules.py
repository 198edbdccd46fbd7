"""ATen ops as functions of JAX arrays, by name: each takes the op's arguments, arrays in the place of tensors.

`lowering` casts each result to the dtype that torch gives it, so a rule only has to compute in a dtype that is wide
enough. Dtypes of arguments are torch's; integers of 64 bits are 32 bits here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from ..bodies.extremes import largest, smallest

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
"""The rules by name of the op, without its overload."""
_function: Any  # JAX's functions and jitted functions have different types

_NARROWED = {torch.int64: "int32", torch.uint64: "uint32"}


def jax_dtype(dtype: torch.dtype) -> Any:
    """The dtype of an array that stands for a tensor of ``dtype``."""
    return jnp.dtype(_NARROWED.get(dtype) or str(dtype).removeprefix("torch."))


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function for ops."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def widened(x: Any) -> Any:
    """16-bit floats in float32, in which torch computes functions of them as well."""
    half = isinstance(x, jax.Array) and x.dtype in (jnp.bfloat16, jnp.float16)
    return x.astype(jnp.float32) if half else x


def floating(x: Any) -> Any:
    """Floats of 32 bits for 16-bit floats and for integers."""
    x = widened(x)
    return x if jnp.issubdtype(jnp.result_type(x), jnp.floating) else jnp.asarray(x, jnp.float32)


def _sign(x: Any) -> Any:
    return jnp.where(jnp.isnan(x), 0, jnp.sign(x)) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.sign(x)


def _digamma(x: Any) -> Any:
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x))


def _unary(name: str, function: Rule) -> None:
    RULES[name] = lambda x, **_: function(floating(x))


for _name in (
    "exp", "exp2", "expm1", "log", "log1p", "log2", "sin", "cos", "tan", "tanh", "sqrt", "sinh", "cosh", "asinh",
    "acosh", "atanh",
):  # fmt: skip
    _unary(_name, getattr(jnp, _name))
for _name, _function in {
    "rsqrt": lax.rsqrt, "erf": lax.erf, "sigmoid": jax.nn.sigmoid, "silu": jax.nn.silu, "reciprocal": lambda x: 1 / x,
    "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)), "hardsigmoid": lambda x: jnp.clip(x + 3, 0, 6) / 6,
    "hardswish": lambda x: x * jnp.clip(x + 3, 0, 6) / 6, "atan": jnp.arctan, "asin": jnp.arcsin, "acos": jnp.arccos,
    "erfc": lax.erfc, "erfinv": lax.erf_inv, "lgamma": lax.lgamma, "digamma": _digamma,
}.items():  # fmt: skip
    _unary(_name, _function)
for _name, _function in {
    "neg": jnp.negative, "abs": jnp.abs, "floor": jnp.floor, "ceil": jnp.ceil, "trunc": jnp.trunc,
    "logical_not": jnp.logical_not, "bitwise_not": jnp.invert, "isnan": jnp.isnan, "isinf": jnp.isinf,
    "sign": _sign, "alias": lambda x: x, "lift_fresh_copy": lambda x: x,
    "relu": lambda x: jnp.maximum(x, jnp.zeros((), x.dtype)),
}.items():  # fmt: skip
    RULES[_name] = lambda x, _function=_function, **_: _function(x)
for _name, _function in {
    "maximum": jnp.maximum, "minimum": jnp.minimum, "eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less,
    "le": jnp.less_equal, "gt": jnp.greater, "ge": jnp.greater_equal, "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or, "logical_xor": jnp.logical_xor, "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or, "bitwise_xor": jnp.bitwise_xor, "remainder": jnp.remainder, "fmod": jnp.fmod,
    "fmax": jnp.fmax, "fmin": jnp.fmin,
}.items():  # fmt: skip
    RULES[_name] = lambda a, b, _function=_function, **_: _function(a, b)


for _name, _function in {"atan2": jnp.arctan2, "hypot": jnp.hypot, "copysign": jnp.copysign}.items():
    RULES[_name] = lambda a, b, _function=_function, **_: _function(floating(a), floating(b))


@rule("add")
def _add(a: Any, b: Any, *, alpha: Any = 1, **_: Any) -> Any:
    return jnp.add(a, b if alpha == 1 else b * alpha)


@rule("sub")
def _sub(a: Any, b: Any, *, alpha: Any = 1, **_: Any) -> Any:
    return jnp.subtract(a, b if alpha == 1 else b * alpha)


def _with_factor(a: Any, b: Any) -> tuple[Any, Any]:
    """Two factors; torch does not round a number to the 16 bits of the other, but only the result."""
    return (widened(a), widened(b)) if isinstance(a, (int, float)) or isinstance(b, (int, float)) else (a, b)


@rule("mul")
def _mul(a: Any, b: Any, **_: Any) -> Any:
    return jnp.multiply(*_with_factor(a, b))


@rule("div")
def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    dtype = jnp.result_type(*(one if isinstance(one, jax.Array) else type(one) for one in (a, b)))
    if rounding_mode == "trunc" and jnp.issubdtype(dtype, jnp.integer):  # float32 does not hold all of them
        return lax.div(*jnp.broadcast_arrays(jnp.asarray(a, dtype), jnp.asarray(b, dtype)))
    if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_:
        a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    y = jnp.true_divide(*_with_factor(a, b))
    return jnp.trunc(y) if rounding_mode == "trunc" else y


@rule("round")
def _round(x: Any, *, decimals: int = 0) -> Any:
    return jnp.round(x, decimals)


@rule("gelu")
def _gelu(x: Any, *, approximate: str = "none") -> Any:
    return jax.nn.gelu(widened(x), approximate=approximate == "tanh")


@rule("leaky_relu")
def _leaky_relu(x: Any, slope: float = 0.01) -> Any:
    return jnp.where(x > 0, x, x * slope)


@rule("elu")
def _elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    wide = widened(x)
    return scale * jnp.where(wide > 0, wide, alpha * jnp.expm1(wide * input_scale))


@rule("softplus")
def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    x = widened(x)
    wide = x * beta
    return jnp.where(wide > threshold, x, jax.nn.softplus(wide) / beta)


@rule("clamp", "hardtanh")
def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    y = x if low is None else jnp.maximum(x, low)
    return y if high is None else jnp.minimum(y, high)


@rule("where")
def _where(condition: Any, a: Any, b: Any) -> Any:
    return jnp.where(condition, a, b)


@rule("masked_fill")
def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@rule("_to_copy")
def _to_copy(x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if dtype is None:
        return x
    wanted = jax_dtype(dtype)
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(wanted, jnp.integer):
        # By way of 32 bits, as torch: XLA would clip to the shorter integers.
        return jnp.trunc(x).astype(jnp.int32).astype(wanted)
    return x.astype(wanted)


RULES["clone"] = lambda x, **_: x
RULES["copy"] = lambda x, y, **_: jnp.broadcast_to(y, x.shape)


# Views.


@rule("view")
def _view(x: Any, size: Any) -> Any:
    if isinstance(size, torch.dtype):
        return lax.bitcast_convert_type(x, jax_dtype(size))
    return x.reshape(tuple(size))


@rule("expand")
def _expand(x: Any, size: Sequence[int], **_: Any) -> Any:
    missing = len(size) - x.ndim
    own = (1,) * missing + x.shape
    return jnp.broadcast_to(x.reshape(own), tuple(o if s == -1 else s for s, o in zip(size, own, strict=True)))


RULES["permute"] = lambda x, dims: jnp.transpose(x, [d % x.ndim for d in dims])
RULES["unsqueeze"] = jnp.expand_dims
RULES["flip"] = lambda x, dims: jnp.flip(x, dims) if x.ndim else x
RULES["repeat"] = lambda x, repeats: jnp.tile(x, tuple(repeats))


@rule("squeeze")
def _squeeze(x: Any, dim: Any = None) -> Any:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return lax.squeeze(x, [d % x.ndim for d in dims if x.ndim and x.shape[d] == 1])


def bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Start and end of a slice of ``size`` elements, as torch reads negative and too large numbers."""
    first = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    last = size if end is None else min(max(end + size if end < 0 else end, 0), size)
    return first, max(first, last)


@rule("slice")
def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    first, last = bounds(x.shape[dim], start, end)
    return lax.slice_in_dim(x, first, last, step, dim)


@rule("select")
def _select(x: Any, dim: int, index: Any) -> Any:
    return lax.index_in_dim(x, index, dim, keepdims=False)


@rule("split_with_sizes")
def _split(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(lax.slice_in_dim(x, at, at + size, 1, dim) for at, size in zip(starts, sizes, strict=True))


@rule("slice_scatter")
def _slice_scatter(x: Any, y: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    first, last = bounds(x.shape[dim], start, end)
    index = [slice(None)] * x.ndim
    index[dim] = slice(first, last, step)
    return x.at[tuple(index)].set(y.astype(x.dtype))


RULES["cat"] = lambda xs, dim=0: jnp.concatenate([x for x in xs if x.shape != (0,)] or list(xs), dim)
RULES["stack"] = lambda xs, dim=0: jnp.stack(xs, dim)


@rule("constant_pad_nd")
def _constant_pad(x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    pairs = [(pad[2 * i], pad[2 * i + 1], 0) for i in range(len(pad) // 2)][::-1]
    return lax.pad(x, jnp.asarray(value, x.dtype), [(0, 0, 0)] * (x.ndim - len(pairs)) + pairs)


# Indexing.


def wrapped(index: Any, size: int) -> Any:
    """Indices with negative ones counted from the end."""
    return jnp.where(index < 0, index + size, index)


@rule("index")
def _index(x: Any, indices: Sequence[Any]) -> Any:
    return x[_places(x, indices)]


def _places(x: Any, indices: Sequence[Any]) -> tuple[Any, ...]:
    found: list[Any] = []
    for index in indices:
        found.append(slice(None) if index is None else wrapped(index, x.shape[len(found)]))
    return tuple(found)


@rule("index_put")
def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    place = x.at[_places(x, indices)]
    return place.add(values.astype(x.dtype)) if accumulate else place.set(values.astype(x.dtype))


@rule("index_select")
def _index_select(x: Any, dim: int, index: Any) -> Any:
    return jnp.take(x, index, axis=dim, mode="clip")


@rule("gather")
def _gather(x: Any, dim: int, index: Any, **_: Any) -> Any:
    own = x[tuple(slice(0, size) if d != dim % x.ndim else slice(None) for d, size in enumerate(index.shape))]
    return jnp.take_along_axis(own, index, axis=dim, mode="clip")


@rule("index_copy")
def _index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    source = rows_of(x, dim, index, source)
    if not x.ndim:
        return source
    if index.size == 1:  # one row: a copy instead of a scatter
        starts: list[Any] = [0] * x.ndim
        starts[dim] = index.reshape(())
        return lax.dynamic_update_slice(x, source, [jnp.asarray(start, jnp.int32) for start in starts])
    place: list[Any] = [slice(None)] * x.ndim
    place[dim] = index.reshape(-1)
    return x.at[tuple(place)].set(source)


def rows_of(x: Any, dim: int, index: Any, source: Any) -> Any:
    """What ``index_copy`` writes into x, with as many dimensions: torch takes a number for one element as well."""
    shape = list(x.shape)
    if shape:
        shape[dim] = index.size
    return source.astype(x.dtype).reshape(shape)


@rule("scatter")
def _scatter(x: Any, dim: int, index: Any, source: Any, *, reduce: str | None = None) -> Any:
    places = list(jnp.meshgrid(*(jnp.arange(size) for size in index.shape), indexing="ij"))
    places[dim % x.ndim] = index
    x = x if reduce is None else widened(x)
    if isinstance(source, jax.Array):
        source = source[tuple(slice(0, size) for size in index.shape)].astype(x.dtype)
    at = x.at[tuple(places)]
    return at.set(source) if reduce is None else at.add(source) if reduce == "add" else at.multiply(source)


@rule("scatter_add")
def _scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    places = list(jnp.meshgrid(*(jnp.arange(size) for size in index.shape), indexing="ij"))
    places[dim % x.ndim] = index
    x = widened(x)
    return x.at[tuple(places)].add(source[tuple(slice(0, size) for size in index.shape)].astype(x.dtype))


# Constants.


for _name in ("empty", "empty_permuted"):
    RULES[_name] = lambda size, *_rest, **_: jnp.zeros(tuple(size))
RULES["full"] = lambda size, value, **_: jnp.full(tuple(size), value)
RULES["full_like"] = lambda x, value, **_: jnp.full(x.shape, value)
RULES["scalar_tensor"] = lambda value, **_: jnp.asarray(value)


@rule("arange")
def _arange(*numbers: Any, **_: Any) -> Any:
    start, end, step = (0, numbers[0], 1) if len(numbers) == 1 else (*numbers, 1)[:3]
    count = max(0, math.ceil((end - start) / step))
    if all(isinstance(one, int) for one in (start, end, step)):
        return start + step * lax.iota(jnp.int32, count)
    return start + step * lax.iota(jnp.float32, count)


# Reductions.


def _axes(dim: Any, ndim: int) -> tuple[int, ...] | None:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return None
    return tuple(d % max(ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)) if ndim else None


def _reduction(function: Callable[..., Any], integers: bool = False) -> Rule:
    def reduce(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
        wide = x.astype(jax_dtype(dtype)) if dtype is not None else x
        wide = wide.astype(jnp.int32) if integers and wide.dtype == jnp.bool_ else widened(wide)
        return function(wide, axis=_axes(dim, x.ndim), keepdims=keepdim)

    return reduce


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": jnp.sum, "mean": jnp.mean, "amax": largest, "amin": smallest, "any": jnp.any,
}  # fmt: skip
for _name, _reduce in _REDUCTIONS.items():
    RULES[_name] = _reduction(_reduce, integers=_name == "sum")


@rule("prod")
def _prod(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    x = x if dtype is None else x.astype(jax_dtype(dtype))
    return jnp.prod(widened(x), axis=_axes(dim, x.ndim), keepdims=keepdim)


def _extreme(reduce: Callable[..., Any], arg: Callable[..., Any]) -> Rule:
    def find(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return reduce(x)
        index = arg(x, axis=dim, keepdims=True)
        value = jnp.take_along_axis(x, index, axis=dim)
        return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))

    return find


RULES["max"], RULES["min"] = _extreme(largest, jnp.argmax), _extreme(smallest, jnp.argmin)


def _arg(function: Callable[..., Any]) -> Rule:
    def find(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        y = function(x.reshape(-1) if dim is None else x, axis=0 if dim is None else dim, keepdims=keepdim)
        return y.reshape((1,) * x.ndim) if dim is None and keepdim else y

    return find


RULES["argmax"], RULES["argmin"] = _arg(jnp.argmax), _arg(jnp.argmin)


@rule("var")
def _var(x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    wide, axes = widened(x), _axes(dim, x.ndim)
    count = x.size if axes is None else math.prod(x.shape[axis] for axis in axes)
    mean = jnp.mean(wide, axes, keepdims=True)
    total = jnp.sum((wide - mean) ** 2, axes, keepdims=keepdim)
    return total / jnp.float32(max(count - (1 if correction is None else correction), 0))


@rule("linalg_vector_norm")
def _vector_norm(x: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    axes, wide = _axes(dim, x.ndim), jnp.abs(widened(x))
    if order == 2:
        return jnp.sqrt(jnp.sum(wide * wide, axis=axes, keepdims=keepdim))
    if order == math.inf:
        return largest(wide, axis=axes, keepdims=keepdim)
    return jnp.sum(wide**order, axis=axes, keepdims=keepdim) ** (1 / order)


@rule("cumsum")
def _cumsum(x: Any, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    # Unlike a sum, `jnp.cumsum` wraps around in the bits of short integers.
    wide = widened(x) if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.int32)
    return jnp.cumsum(wide if dtype is None else wide.astype(jax_dtype(dtype)), axis=dim) if x.ndim else wide


@rule("topk")
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002 - torch's
    del sorted
    turned = jnp.invert if jnp.issubdtype(x.dtype, jnp.integer) else jnp.negative  # unsigned, the least has no negative
    last = jnp.moveaxis(x, dim, -1)
    values, indices = lax.top_k(last if largest else turned(last), k)
    return jnp.moveaxis(values if largest else turned(values), -1, dim), jnp.moveaxis(indices, -1, dim)


@rule("sort")
def _sort(x: Any, *given: Any, dim: int = -1, descending: bool = False, **_: Any) -> Any:
    if given:
        dim, descending = given[0], given[1] if len(given) > 1 else descending
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis=dim), order


@rule("native_layer_norm")
def _native_layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    wide = widened(x)
    mean = jnp.mean(wide, axes, keepdims=True)
    scale = lax.rsqrt(jnp.var(wide, axes, keepdims=True) + eps)
    y = (wide - mean) * scale
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, scale


@rule("native_batch_norm")
def _eval_batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any) -> Any:
    assert not training
    return _batch_norm(x, weight, bias, mean, var, *rest)


@rule("_native_batch_norm_legit_no_training")
def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> Any:
    del momentum
    shape = (1, -1) + (1,) * (x.ndim - 2)
    y = (widened(x) - mean.reshape(shape)) * lax.rsqrt(widened(var).reshape(shape) + eps)
    y = y if weight is None else y * weight.reshape(shape)
    empty: Array = jnp.zeros((0,), jnp.float32)
    return (y if bias is None else y + bias.reshape(shape)), empty, empty


@rule("native_group_norm")
def _group_norm(x: Any, weight: Any, bias: Any, n: int, c: int, hw: int, groups: int, eps: float) -> Any:
    wide = widened(x).reshape(n, groups, c // groups * hw)
    mean, var = jnp.mean(wide, -1, keepdims=True), jnp.var(wide, -1, keepdims=True)
    scale = lax.rsqrt(var + eps)
    shape = (1, c) + (1,) * (x.ndim - 2)
    y = ((wide - mean) * scale).reshape(x.shape)
    y = y if weight is None else y * weight.reshape(shape)
    return (y if bias is None else y + bias.reshape(shape)), mean[..., 0], scale[..., 0]
