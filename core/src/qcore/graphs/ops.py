"""The op list: what the nodes of a captured graph call, and the neutral float ops among them.

Five ops of ``torch.ops.qcore_graph`` keep whole what torch would take apart, and four stand for quantized layers:

* ``dense(x, weight, bias)``: ``x @ weight^T + bias``, x ``(..., K)``, weight ``(N, K)``;
* ``attention(q, k, v, mask, is_causal, scale)``: softmax(q @ k^T * scale + mask) @ v; q ``(B, H, L, E)``, k
  ``(B, Hk, S, E)``, v ``(B, Hk, S, Ev)``, with grouped heads if Hk divides H; ``mask``: float (added) or bool (True:
  takes part), broadcast to ``(B, H, L, S)``; ``is_causal``: position i sees positions up to i;
* ``rms_norm(x, weight, eps)``: ``x * rsqrt(mean(x^2) + eps) * weight`` along the last dimension, in float32, rounded to
  x's dtype before the weight is applied;
* ``layer_norm(x, weight, bias, eps)`` along the last dimension;
* ``rope(x, cos, sin)``: rotary embedding, ``x * cos + cat(-x2, x1) * sin`` with x1 and x2 the halves of the last
  dimension;
* ``linear``, ``embedding``, ``conv2d``, ``grouped_linear``: quantized layers, see `qcore.nn.graph_ops`.

All other nodes call overloads of ``torch.ops.aten``, listed in `ATEN`: torch's core ATen ops and a few that torch
would decompose further (`KEPT`).
"""

# ruff: noqa: ARG001 - a fake has the signature of its op

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..discovery.kernels import define_op
from ..nn.graph_ops import NAMESPACE
from . import fused

QUANTIZED = ("linear", "embedding", "conv2d", "grouped_linear")
"""Names of the ops that stand for quantized layers."""
WHOLE = ("dense", "attention", "rms_norm", "layer_norm", "rope")
"""Names of the float ops that are kept whole."""

VIEWS = ("view", "expand", "permute", "squeeze", "unsqueeze", "slice", "select", "alias", "split_with_sizes")
ELEMENTWISE = (
    "add", "sub", "mul", "div", "pow", "neg", "abs", "sign", "reciprocal", "rsqrt", "sqrt", "exp", "exp2", "expm1",
    "log", "log1p", "log2", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "sigmoid", "erf",
    "relu", "gelu", "silu", "mish", "hardtanh", "hardsigmoid", "hardswish", "leaky_relu", "elu", "softplus", "clamp",
    "maximum", "minimum", "where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
    "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor", "floor", "ceil", "round",
    "trunc", "remainder", "fmod", "isnan", "isinf", "_to_copy", "clone", "copy",
)  # fmt: skip
REDUCTIONS = (
    "sum", "mean", "amax", "amin", "max", "min", "prod", "any", "argmax", "argmin", "var", "cumsum", "_softmax",
    "linalg_vector_norm", "_log_softmax", "topk", "sort", "native_layer_norm", "native_group_norm", "native_batch_norm",
    "_native_batch_norm_legit_no_training",
)  # fmt: skip
PRODUCTS = ("mm", "bmm", "addmm", "convolution", "embedding", "avg_pool2d")
MOVES = (
    "cat", "stack", "index", "index_select", "gather", "index_put", "index_copy", "scatter", "scatter_add",
    "slice_scatter", "flip", "repeat", "constant_pad_nd",
)  # fmt: skip
CONSTANTS = ("arange", "full", "full_like", "empty", "empty_permuted", "scalar_tensor", "lift_fresh_copy")

ATEN: tuple[str, ...] = (*VIEWS, *ELEMENTWISE, *REDUCTIONS, *PRODUCTS, *MOVES, *CONSTANTS)
"""Names of the ATen ops (without overload) that models decompose to and that a backend should run.

The others that torch has no decomposition for stay on the host, unless a backend runs them as well.
"""

KEPT = (
    "silu", "gelu", "index_copy", "masked_fill", "hardswish", "hardsigmoid", "leaky_relu", "elu", "softplus", "mish",
    "_softmax", "embedding", "stack", "topk",
)  # fmt: skip
"""ATen ops of the list for which torch has decompositions that are not applied."""

MORE = ("addmv", "dist")
"""Ops outside of the core ATen ops that torch's decompositions take apart as well.

Not ``grid_sampler_2d``, whose decomposition makes integers of coordinates that are NaN, infinite or beyond 64 bits, nor
``ldexp``, whose power of two overflows before it is multiplied.
"""


@lru_cache(maxsize=1)
def decompositions() -> dict[Any, Any]:
    """Torch's decompositions to core ATen ops without `KEPT`, with `MORE`, those in `fused` and two of our own."""
    from torch._decomp import core_aten_decompositions, decomposition_table

    table: Any = core_aten_decompositions()
    found = {op: rule for op, rule in table.items() if base_name(op) not in KEPT}
    more = {op: rule for op, rule in decomposition_table.items() if base_name(op) in MORE}
    fills = dict.fromkeys((torch.ops.aten.index_fill.int_Scalar, torch.ops.aten.index_fill.int_Tensor), _filled)
    return {**more, **found, **fused.DECOMPOSITIONS, **fills, torch.ops.aten.roll.default: _rolled}


def _rolled(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """``aten::roll`` by slices: torch selects all elements by an index."""
    if not dims:
        return _rolled(x.flatten(), shifts, [0]).view(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        first = -shift % size if size else 0
        if first:
            x = torch.cat((x.narrow(dim, first, size - first), x.narrow(dim, 0, first)), dim)
        else:  # without a part that has no elements
            x = x.clone(memory_format=torch.contiguous_format)
    return x


def _filled(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """``aten::index_fill`` by an index that may be negative: torch copies, and copies take none."""
    if not x.dim():
        return _filled(x.unsqueeze(0), 0, index, value).squeeze(0)
    filled = value.to(x.dtype) if isinstance(value, Tensor) else x.new_full((), value)
    y: Tensor = torch.ops.aten.index_put(x, (*[None] * (dim % x.dim()), index.reshape(-1)), filled)
    return y


def base_name(target: Any) -> str:
    """The name of an op without namespace and overload: ``"add"`` for ``torch.ops.aten.add.Tensor``."""
    if isinstance(target, torch._ops.HigherOrderOperator):  # noqa: SLF001 - torch has no public name for it
        return str(target)
    return str(getattr(target, "_schema", target)).partition("(")[0].partition("::")[2].partition(".")[0]


def is_whole(target: Any) -> bool:
    """Whether ``target`` is one of the ops of ``torch.ops.qcore_graph``."""
    return getattr(target, "namespace", "") == NAMESPACE


def _dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _dense_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    grouped = q.dim() > 2 and q.shape[-3] != k.shape[-3]
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    return y.contiguous()


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else weight * y


def _rms_norm_fake(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps).contiguous()


def _layer_norm_fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _rope_fake(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(x.shape, cos.shape)  # type: ignore[no-untyped-call]
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, cos.dtype))


_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_define = partial(define_op, _library, keys=("CompositeExplicitAutograd",))

_define("dense(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _dense, _dense_fake)
_define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float? scale) -> Tensor",
    _attention,
    _attention_fake,
)
_define("rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor", _rms_norm, _rms_norm_fake)
_define("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor", _layer_norm, _layer_norm_fake)
_define("rope(Tensor x, Tensor cos, Tensor sin) -> Tensor", _rope, _rope_fake)
