"""Replaces calls that torch would decompose by the ops of `qcore.graphs.ops` that keep them whole.

It runs on the graph that Dynamo has recorded, in which `torch.nn.functional` is still visible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from .inlining import inlined
from .items import ask_items, is_item


def keep_whole(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the recorded graph in which linear, attention and norms call ``torch.ops.qcore_graph``.

    These ops have no derivatives: a graph that computes some by `torch.func.jvp` stays as it is. So does what is within
    `torch.vmap`, of which torch knows how to compute a batch.
    """
    module, graph = inlined(module), fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    ask_items(graph)
    if computes(module, "_jvp_increment_nesting"):
        return fx.GraphModule(module, graph)
    depth = 0
    for node in graph.nodes:
        depth += _DEPTHS.get(getattr(node.target, "__name__", ""), 0)
        rule = _RULES.get(node.target) if node.op == "call_function" and not depth else None
        made = rule(*node.args, **node.kwargs) if rule is not None else None
        if made is not None:
            node.target, node.args, node.kwargs = made[0], _as_autocast(node, made[1]), {}
    return fx.GraphModule(module, graph)


def computes(module: fx.GraphModule, name: str) -> bool:
    """Whether a recorded graph calls a function by its name: those of `torch.func` where a derivative begins."""
    return any(getattr(node.target, "__name__", "") == name for node in module.graph.nodes)


def _as_autocast(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a whole op in the dtype that autocast had for the call: it knows torch's ops only."""
    x, y = _value(args[0]), _value(node)
    mixed = node.target in {_op("rms_norm"), _op("layer_norm")}  # without autocast as well
    if y is None or (mixed and x.dtype == y.dtype):
        return args
    return tuple(_cast(node, one, y.dtype) for one in args)


def _cast(before: fx.Node, one: Any, dtype: torch.dtype) -> Any:
    value = _value(one)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
        return one
    with before.graph.inserting_before(before):
        return before.graph.call_method("to", (one, dtype))


def scalars(module: fx.GraphModule) -> list[int]:
    """Positions of the placeholders that stand for Python floats, or for integers that no tensor can take the place of.

    Once a float of a module differs between two calls (the epsilon of a norm, in two models), Dynamo passes it as a
    tensor, of which the graph asks `item`. For integers see `items`.
    """
    places = enumerate(module.graph.find_nodes(op="placeholder"))
    return [i for i, place in places if any(map(is_item, place.users))]


def with_scalars(module: fx.GraphModule, values: Mapping[int, float]) -> fx.GraphModule:
    """A copy of the graph with the values of its `scalars`, by position, as constants where it asks for them."""
    if not values:
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    places = graph.find_nodes(op="placeholder")
    for i, value in values.items():
        for user in [one for one in places[i].users if is_item(one)]:
            with graph.inserting_before(user):
                user.replace_all_uses_with(graph.call_function(type(value), (value,)))
            graph.erase_node(user)
    return fx.GraphModule(module, graph)


_Made = tuple[Any, tuple[Any, ...]] | None


def _op(name: str) -> Any:
    return getattr(torch.ops.qcore_graph, name).default


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _linear(input: Any, weight: Any, bias: Any = None) -> _Made:  # noqa: A002 - torch's name
    x, w = _value(input), _value(weight)
    plain = isinstance(x, torch.Tensor) and isinstance(w, torch.Tensor) and w.dim() == 2 and x.dim() > 0
    return (_op("dense"), (input, weight, bias)) if plain and x.is_floating_point() else None


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False,
    scale: Any = None, enable_gqa: Any = False,
) -> _Made:  # fmt: skip
    q, k = _value(query), _value(key)
    if dropout_p != 0.0 or not isinstance(is_causal, bool) or q is None or k is None or q.dim() != 4 or k.dim() != 4:
        return None
    if q.shape[0] != k.shape[0] or (not enable_gqa and q.shape[1] != k.shape[1]):
        return None  # broadcasts
    return _op("attention"), (query, key, value, attn_mask, is_causal, scale)


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> _Made:  # noqa: A002
    x = _value(input)
    if x is None or len(normalized_shape) != 1 or x.dtype != torch.float32:
        return None  # torch applies the weight before it rounds, and takes the epsilon of x's dtype
    return _op("rms_norm"), (input, weight, torch.finfo(x.dtype).eps if eps is None else eps)


def _layer_norm(
    input: Any,  # noqa: A002
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    *_rest: Any,
) -> _Made:
    if len(normalized_shape) != 1 or _value(input) is None:
        return None
    return _op("layer_norm"), (input, weight, bias, eps)


_DEPTHS = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}
"""What calls add to the number of `torch.vmap` around those behind them."""
_RULES: dict[Any, Callable[..., _Made]] = {
    F.linear: _linear,
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
}
