"""Windows that slide: caches that move by one and take a new element at the end.

A ``roll`` is a ``cat`` of two slices (`ops`); ``x[:, index] = new`` with a constant index would be a copy of that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from .folding import constant_value, is_constant
from .ops import base_name
from .recognizing import replace_node

_aten = torch.ops.aten


def replace_joined(module: fx.GraphModule) -> None:
    """Let ``cat`` join what ``index_put`` would write in the place of one of its parts, in place.

    Both have to be one element along the joined dimension, and the index a constant.
    """
    values: dict[fx.Node, Any] = {}
    writes = [one for one in module.graph.nodes if one.op == "call_function" and base_name(one.target) == "index_put"]
    for node in writes:
        _replace(module, node, values)
    if writes:
        module.graph.eliminate_dead_code()
        module.recompile()


def _replace(module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> None:
    arguments: Any = node.args
    joined, indices, new, *accumulate = arguments
    at = [i for i, one in enumerate(indices) if one is not None]
    if base_name(joined.target) != "cat" or any(accumulate) or len(at) != 1:
        return
    (dim,), like = at, node.meta["val"]
    index = indices[dim]
    if index.meta["val"].dtype not in {torch.int64, torch.int32} or index.meta["val"].numel() != 1:
        return
    parts = _parts(joined, dim)
    form = new.meta["val"].device, new.meta["val"].dtype
    if not is_constant(index) or parts is None or form != (like.device, like.dtype):
        return
    with _disable_current_modes(), torch.no_grad():  # torch calls this while it traces with tensors without values
        place = int(constant_value(module, index, values))
    place += like.shape[dim] if place < 0 else 0
    found = next((i for i, (start, one) in enumerate(parts) if (start, one.meta["val"].shape[dim]) == (place, 1)), None)
    if found is None:
        return
    with module.graph.inserting_before(node):
        part = _expanded(module.graph, new, like, dim, index.meta["val"].dim())
    joined = [part if i == found else one for i, (_, one) in enumerate(parts)]
    replace_node(module.graph, node, _aten.cat.default, (joined, dim))


def _parts(joined: Any, dim: int) -> list[tuple[int, fx.Node]] | None:
    """What a ``cat`` joins along ``dim``, each with its beginning; None if it joins another dimension or dtypes."""
    like, start, found = joined.meta["val"], 0, []
    along = joined.args[1] if len(joined.args) > 1 else 0
    for one in joined.args[0]:
        if one.meta["val"].dtype != like.dtype or one.meta["val"].dim() != like.dim():
            return None
        found.append((start, one))
        start += one.meta["val"].shape[dim]
    return found if along % like.dim() == dim else None


def _expanded(graph: fx.Graph, new: Any, like: Tensor, dim: int, index_dims: int) -> fx.Node:
    """``new``, which broadcasts to what an index of ``index_dims`` dimensions selects, as a part of one element."""
    shape = [*like.shape[:dim], *[1] * index_dims, *like.shape[dim + 1 :]]
    value = new.meta["val"].expand(shape)
    part = graph.call_function(_aten.expand.default, (new, shape))
    part.meta = {"val": value}
    whole = [*like.shape[:dim], 1, *like.shape[dim + 1 :]]
    if index_dims != 1:
        part = graph.call_function(_aten.reshape.default, (part, whole))
        part.meta = {"val": value.reshape(whole)}
    return part
