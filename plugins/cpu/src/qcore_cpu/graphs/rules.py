"""The ops that programs compute, by name: for each a rule that appends its steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from qcore.plugin_api import base_name, is_whole

from .layers import embedding_step, layer_places
from .lowering import Lowering, Rule
from .memory import Value, place_of
from .steps import Attention, IndexCopy, Linear, Norm, Operation, Rope

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
WHOLE = frozenset({torch.int64, torch.int32, torch.bool})
FEW_ROWS = 8
"""The most rows of queries that the library computes; for more, torch's attention has matrix products."""

RULES: dict[str, Rule] = {}

_UNARY = {
    "neg": Operation.NEG, "abs": Operation.ABS, "reciprocal": Operation.RECIPROCAL, "rsqrt": Operation.RSQRT,
    "sqrt": Operation.SQRT, "exp": Operation.EXP, "log": Operation.LOG, "sin": Operation.SIN, "cos": Operation.COS,
    "tanh": Operation.TANH, "erf": Operation.ERF, "sigmoid": Operation.SIGMOID, "silu": Operation.SILU,
    "relu": Operation.RELU, "logical_not": Operation.NOT, "bitwise_not": Operation.NOT, "gelu": Operation.GELU,
    "clone": Operation.IDENTITY, "_to_copy": Operation.IDENTITY, "lift_fresh_copy": Operation.IDENTITY,
}  # fmt: skip
COMPARISONS = {
    "eq": Operation.EQ, "ne": Operation.NE, "lt": Operation.LT, "le": Operation.LE, "gt": Operation.GT,
    "ge": Operation.GE,
}  # fmt: skip
_BINARY = {
    "add": Operation.ADD, "sub": Operation.SUB, "mul": Operation.MUL, "div": Operation.DIV, "pow": Operation.POW,
    "maximum": Operation.MAXIMUM, "minimum": Operation.MINIMUM, "logical_and": Operation.AND,
    "logical_or": Operation.OR, "logical_xor": Operation.XOR, "bitwise_and": Operation.AND, "bitwise_or": Operation.OR,
    "bitwise_xor": Operation.XOR, **COMPARISONS,
}  # fmt: skip
IN_INTEGERS = frozenset({
    Operation.IDENTITY, Operation.ADD, Operation.SUB, Operation.MUL, Operation.MAXIMUM, Operation.MINIMUM,
    *COMPARISONS.values(), Operation.AND, Operation.OR, Operation.XOR, Operation.NOT, Operation.WHERE, Operation.NEG,
    Operation.ABS,
})  # fmt: skip
"""Operations of the library on integers of 64 bits."""
_ROOTS: Any = {0.5: Operation.SQRT, -0.5: Operation.RSQRT}
_IN_RESULT = frozenset({"add", "sub", "mul", "div", "pow"})
"""Ops of several tensors whose result depends on whether these were rounded to its dtype before."""
ELEMENTWISE = {**_UNARY, **_BINARY, "where": Operation.WHERE, "masked_fill": Operation.WHERE, "clamp": Operation.CLAMP}


def rule_name(target: Any) -> str:
    """The name of an op in `RULES`."""
    name = base_name(target)
    return f"qcore_graph.{name}" if is_whole(target) else name


def rule_of(target: Any) -> Rule:
    """The rule of an op that `why_not` accepts."""
    return RULES[rule_name(target)]


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def operands(node: fx.Node) -> list[Any]:
    """What an op element by element computes with, in the order of the library: nodes and numbers."""
    name, args = base_name(node.target), list(node.args)
    if name == "masked_fill":
        return [args[1], args[2], args[0]]
    if name == "clamp":
        low, high = [*args[1:], None, None][:2]
        return [args[0], -math.inf if low is None else low, math.inf if high is None else high]
    return args[: 1 if name in _UNARY else 3 if name == "where" else 2]


def _any(argument: Any) -> Any:
    """An argument of a node, whose type its op knows."""
    return argument


def in_integers(node: fx.Node) -> bool:
    """Whether an op element by element reads and gives integers and booleans only."""
    values = [one.meta["val"] if isinstance(one, fx.Node) else one for one in (node, *operands(node))]
    return all(
        value.dtype in WHOLE if isinstance(value, Tensor) else isinstance(value, (bool, int)) for value in values
    )


@_rule(*ELEMENTWISE)
def _elementwise(low: Lowering, node: fx.Node) -> Value:
    found: list[Any] = operands(node)
    name, operation = base_name(node.target), ELEMENTWISE[base_name(node.target)]
    if name == "gelu" and node.kwargs.get("approximate", "none") == "tanh":
        operation = Operation.GELU_TANH
    if name == "pow" and found[1] == 2:  # as torch
        operation, found = Operation.MUL, [found[0], found[0]]
    elif name == "pow" and found[1] in _ROOTS and node.meta["val"].dtype != torch.float16:  # as torch
        operation, found = _ROOTS[found[1]], found[:1]
    values = [low.value(one) if isinstance(one, fx.Node) else one for one in found]
    if name in COMPARISONS or name in {"add", "sub", "pow"}:
        values = _rounded(values)
    like, whole = node.meta["val"], in_integers(node)
    if name in _IN_RESULT and like.dtype in FLOATS:
        by_one = name in {"mul", "div"}
        values = [_converted(low, one, like.dtype, exact=by_one and i == 1) for i, one in enumerate(values)]
    alpha: Any = node.kwargs.get("alpha", 1)
    alpha = _rounded_number(alpha, like.dtype) if like.dtype in FLOATS else alpha
    return low.elementwise(operation, values, low.new(like.shape, like.dtype), alpha=alpha, whole=whole)


def _rounded(values: list[Any]) -> list[Any]:
    """Numbers as torch adds and compares them: rounded to the dtype of the tensor. Factors are not."""
    dtypes = [one.meta.dtype for one in values if isinstance(one, Value)]
    if len(dtypes) == len(values) or dtypes[0] not in FLOATS:
        return values
    return [one if isinstance(one, Value) else _rounded_number(one, dtypes[0]) for one in values]


def _rounded_number(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=dtype, device="cpu"))


def _converted(low: Lowering, value: Any, dtype: torch.dtype, *, exact: bool) -> Any:
    """An operand rounded to the dtype that torch computes in; ``exact``: a single number is not, as in torch."""
    if not isinstance(value, Value) or value.meta.dtype in {dtype, torch.bool} or dtype == torch.float32:
        return value
    if exact and value.meta.numel() == 1:
        return value
    return low.elementwise(Operation.IDENTITY, [value], low.new(value.meta.shape, dtype, scratch=True))


@_rule("copy")
def _copy(low: Lowering, node: fx.Node) -> Value:
    like = node.meta["val"]
    whole = {like.dtype, node.args[1].meta["val"].dtype} <= WHOLE  # type: ignore[union-attr]
    return low.elementwise(Operation.IDENTITY, [low.value(node.args[1])], low.new(like.shape, like.dtype), whole=whole)


@_rule("cat")
def _cat(low: Lowering, node: fx.Node) -> Value:
    like: Tensor = node.meta["val"]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    dim, made, start = dim % like.dim(), low.new(like.shape, like.dtype), 0
    for one in node.args[0]:  # type: ignore[union-attr]
        part = low.value(one)
        size = part.meta.shape[dim]
        low.copy(part, made.viewed(made.meta.narrow(dim, start, size)))
        start += size
    return made


@_rule("index_copy")
def _index_copy(low: Lowering, node: fx.Node) -> Value:
    x, dim, index, source = map(_any, node.args)
    own, at, new = low.value(x), low.contiguous(low.value(index)), low.contiguous(low.value(source))
    shape = own.meta.shape
    place = dim % len(shape)
    if not low.written_in_place(own):
        made = low.new(shape, own.meta.dtype)
        low.copy(own, made)
        own = made
    else:  # which changes what is read of it
        at, new = (low.copied(one) if one.slot == own.slot else one for one in (at, new))
    inner = math.prod(shape[place + 1 :]) * own.meta.itemsize
    count, outer = at.meta.numel(), math.prod(shape[:place])
    low.done.steps.append(IndexCopy(own.place, at.place, new.place, outer, shape[place], count, inner))
    return own


@_rule("qcore_graph.rms_norm")
def _rms_norm(low: Lowering, node: fx.Node) -> Value:
    x, weight, eps = node.args
    return _norm(low, node, x, weight, None, eps)


@_rule("qcore_graph.layer_norm")
def _layer_norm(low: Lowering, node: fx.Node) -> Value:
    x, weight, bias, eps = node.args
    return _norm(low, node, x, weight, bias, eps, centred=True)


def _norm(low: Lowering, node: fx.Node, x: Any, weight: Any, bias: Any, eps: Any, *, centred: bool = False) -> Value:
    own, like = low.contiguous(low.value(x)), node.meta["val"]
    scale, offset = (None if one is None else low.contiguous(low.value(one)) for one in (weight, bias))
    made = low.new(like.shape, like.dtype)
    n = own.meta.shape[-1]
    places = (own.place, place_of(scale), place_of(offset), made.place)
    low.done.steps.append(Norm(*places, own.meta.numel() // n, n, eps, centred))
    return made


@_rule("qcore_graph.rope")
def _rope(low: Lowering, node: fx.Node) -> Value:
    like: Tensor = node.meta["val"]
    width = like.shape[-1]
    shape = (*(1,) * (4 - like.dim()), *like.shape)
    parts = [low.rows(low.value(one)) for one in node.args]
    made = low.new(like.shape, like.dtype)
    step = Rope(*(one.place for one in parts), made.place)
    step.sizes[:], step.width = shape[:3], width
    for strides, one in zip((step.x_strides, step.cos_strides, step.sin_strides), parts, strict=True):
        strides[:] = one.meta.expand(shape).stride()[:3]
    low.done.steps.append(step)
    return made


@_rule("qcore_graph.attention")
def _attention(low: Lowering, node: fx.Node) -> Value | None:
    q, k, v, mask, causal, scale = node.args
    like: Tensor = node.meta["val"]
    if not is_native_attention(node):
        return None
    parts = [low.rows(low.value(one)) for one in (q, k, v)]
    (batch, heads, rows, width), (_, kv_heads, positions, _) = parts[0].meta.shape, parts[1].meta.shape
    added = None if mask is None else low.value(mask)
    made = low.new(like.shape, like.dtype)
    step = Attention(*(one.place for one in parts), place_of(added), made.place)
    step.batch, step.heads, step.kv_heads, step.rows = batch, heads, kv_heads, rows
    step.positions, step.width, step.v_width = positions, width, like.shape[-1]
    for strides, one in zip((step.q_strides, step.k_strides, step.v_strides), parts, strict=True):
        strides[:] = one.meta.stride()[:3]
    if added is not None:
        step.mask_strides[:] = added.meta.expand(batch, heads, rows, positions).stride()
    step.scale = 1 / math.sqrt(width) if scale is None else scale
    step.causal = bool(causal)
    low.done.steps.append(step)
    return made


def is_native_attention(node: fx.Node) -> bool:
    """Whether the library computes an attention: few rows, of four dimensions and one dtype."""
    q, k, v = (_any(one).meta["val"] for one in node.args[:3])
    mask = None if node.args[3] is None else _any(node.args[3]).meta["val"]
    if any(one.dim() != 4 or one.dtype != q.dtype or one.shape[0] != q.shape[0] for one in (q, k, v)):
        return False
    fits = q.dtype in FLOATS and q.shape[2] <= FEW_ROWS and q.shape[1] % k.shape[1] == 0 and k.shape[1] == v.shape[1]
    return fits and (mask is None or mask.dtype == torch.bool or mask.dtype in FLOATS)


@_rule("qcore_graph.linear")
def _linear(low: Lowering, node: fx.Node) -> Value | None:
    x, weight, bias, scheme, n, out_dtype = map(_any, node.args)
    own = low.value(x)
    k, position = own.meta.shape[-1], low.position(weight)
    fits = bias is None or low.value(bias).meta.dtype in FLOATS
    layer = layer_places(low, position, "linear", str(scheme), own.meta.dtype, out_dtype) if fits else None
    if layer is None:
        return None
    kernel, packed, at = layer
    own, offset = low.contiguous(own), None if bias is None else low.contiguous(low.value(bias))
    made = low.new((*own.meta.shape[:-1], n), out_dtype)
    step = Linear(
        own.place, at["codes"], at["scale"], at["zero"], at["sums"], at["table"], at["factor"], place_of(offset),
        made.place, own.meta.numel() // k, packed["data"].numel(),
    )  # fmt: skip
    low.done.steps.append(step, kernel.form)
    return made


@_rule("qcore_graph.embedding")
def _embedding(low: Lowering, node: fx.Node) -> Value | None:
    indices, weight, scheme, k, out_dtype = map(_any, node.args)
    own = low.value(indices)
    layer = layer_places(low, low.position(weight), "embedding", str(scheme), own.meta.dtype, out_dtype)
    if layer is None:
        return None
    kernel, packed, at = layer
    own = low.contiguous(own)
    made = low.new((*own.meta.shape, k), out_dtype)
    low.done.steps.append(embedding_step(kernel, own, packed, at, made))
    return made


@_rule("qcore_graph.dense", "qcore_graph.conv2d", "qcore_graph.grouped_linear")
def _in_torch(low: Lowering, node: fx.Node) -> None:
    """Torch's products of floats, and layers whose kernels are called as the layers call them."""
