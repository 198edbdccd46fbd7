"""What the device runs of a captured graph, and why not the rest."""

from __future__ import annotations

import operator
from functools import lru_cache

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from qcore.plugin_api import is_constant, is_whole

from .numbers import DTYPES
from .rules import REFUSALS, RULES, rule_name


def why_not(node: fx.Node) -> str:
    """Why a node stays on the host, a sentence; empty if the device runs it."""
    if not node.users and is_constant(node):
        return ""
    if found := _why_not_tensors(node):
        return found
    if is_constant(node, alone=True):
        return ""
    name = rule_name(node.target)
    if name not in RULES:
        return f"{name} has no kernel in qcore_vulkan"
    if name in _ALONG and len(node.args) > 1 and not node.args[0].meta["val"].dim():  # type: ignore[union-attr]
        return f"{name} of a tensor without dimensions has no kernel in qcore_vulkan"
    return (REFUSALS[name](node) if name in REFUSALS else "") or _why_not_numbers(node, name)


def _why_not_tensors(node: fx.Node) -> str:
    tensors = _tensors(node)
    dtypes = [tensor.dtype for tensor in tensors if tensor.dtype not in DTYPES]
    if dtypes:
        return f"it has tensors of {dtypes[0]}, which qcore_vulkan does not compute in"
    if any(tensor.numel() == 0 for tensor in tensors):
        return "it has a tensor without elements"
    largest = max((4 * tensor.numel() for tensor in tensors), default=0)
    if largest > _largest_range():
        return f"it has a tensor of {largest} bytes, and shaders address {_largest_range()} at once"
    return ""


def _why_not_numbers(node: fx.Node, name: str) -> str:
    if name in _POSITIONS:
        return ""
    numbers = [one for one in pytree.tree_leaves((node.args, node.kwargs)) if type(one) is int]
    large = [one for one in numbers if not -(1 << 31) <= one < 1 << 31]
    return f"{large[0]} does not fit the 32 bits in which integers are computed" if large else ""


_ALONG = frozenset({"topk", "max", "min", "index_select", "gather"})
"""Ops along a dimension, of which torch lets a tensor without dimensions have one of size 1."""
_POSITIONS = frozenset({"slice", "slice_scatter"})
"""Ops that read large numbers as "up to the end"."""


_IN_PARTS = {"qcore_graph.dense": 1, "embedding": 0}
"""Ops that read a weight in parts, and its position."""


def _tensors(node: fx.Node) -> list[Tensor]:
    """The fake tensors that a node takes and gives, but for weights, which may be larger than shaders address."""
    skipped: fx.Node | None = None
    if is_whole(node.target):
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr] # noqa: SLF001
        skipped = node.args[names.index("weight")] if "scheme" in names else None  # type: ignore[assignment]
    if skipped is None and rule_name(node.target) in _IN_PARTS:
        weight = node.args[_IN_PARTS[rule_name(node.target)]]
        skipped = weight if isinstance(weight, fx.Node) and weight.op == "placeholder" else None
    values = [_read(node), *(one.meta.get("val") for one in node.all_input_nodes if one is not skipped)]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _read(node: fx.Node) -> object:
    """The value of a node; of a tuple what is read."""
    value = node.meta.get("val")
    if not isinstance(value, (tuple, list)):
        return value
    return [value[user.args[1]] for user in node.users if user.target is operator.getitem and user.users]  # type: ignore[index]


@lru_cache(maxsize=1)
def _largest_range() -> int:
    from ..eligibility import largest_range

    return largest_range()
