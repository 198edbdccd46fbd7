"""What programs compute of a captured graph, and why not the rest."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from qcore.plugin_api import is_constant, is_whole

from .lowering import is_view
from .rules import COMPARISONS, ELEMENTWISE, FLOATS, IN_INTEGERS, RULES, WHOLE, in_integers, operands, rule_name
from .steps import DIMS, Operation

_BITWISE = frozenset({"bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"})
_ROPE_DIMS = 4


def why_not(node: fx.Node) -> str:
    """Why a node runs in torch and ends a part, a sentence; empty if programs have it."""
    name = rule_name(node.target)
    tensors = _tensors(node)
    if any(one.numel() == 0 for one in tensors):
        return "it has a tensor without elements"
    if any(one.layout != torch.strided or one.is_complex() for one in tensors):
        return "it has a tensor that is sparse or complex"
    if is_constant(node, alone=True) or node.target is operator.getitem or is_view(node):
        return ""
    if name not in RULES:
        return f"{name} has no kernel in qcore_cpu"
    if is_whole(node.target):
        return _why_not_whole(node, name.partition(".")[2])
    return _why_not_aten(node, name, tensors)


def _why_not_whole(node: fx.Node, name: str) -> str:
    values = [one.meta["val"] for one in node.args if isinstance(one, fx.Node)]
    if name in {"rms_norm", "layer_norm"} and not all(one.dtype in FLOATS for one in (*values, node.meta["val"])):
        return f"{name} in {values[0].dtype} has no kernel in qcore_cpu"
    if name in {"rms_norm", "layer_norm"}:
        x, *factors = values
        fits = x.dim() and all(one.shape == x.shape[-1:] for one in factors)
        return "" if fits else f"{name} of this form has no kernel in qcore_cpu"
    if name == "rope":
        x, cos, sin = values
        shape = node.meta["val"].shape
        rows = all(one.shape[-1:] == shape[-1:] and one.dtype in FLOATS for one in (x, cos, sin))
        if not rows or shape[-1] % 2 or len(shape) > _ROPE_DIMS or cos.dtype != sin.dtype:
            return "rope of this form has no kernel in qcore_cpu"
    return ""


def _why_not_aten(node: fx.Node, name: str, tensors: list[Tensor]) -> str:
    other = next((one.dtype for one in tensors if one.dtype not in FLOATS | WHOLE), None)
    if other is not None:
        return f"it has tensors of {other}, which qcore_cpu does not compute in"
    if any(one.dim() > DIMS for one in tensors):
        return f"it has a tensor of more than {DIMS} dimensions"
    return _why_not_elementwise(node, name) if name in ELEMENTWISE else _why_not_moved(node, name, tensors)


def _why_not_moved(node: fx.Node, name: str, tensors: list[Tensor]) -> str:
    result = node.meta["val"]
    if name == "cat":
        same = all(one.dtype == result.dtype and one.dim() == result.dim() for one in tensors)
        return "" if same else "cat of several dtypes has no kernel in qcore_cpu"
    if name == "index_copy":
        x, _, _, source = node.args
        fits = x.meta["val"].dim() and x.meta["val"].dim() == source.meta["val"].dim()  # type: ignore[union-attr]
        same = x.meta["val"].dtype == source.meta["val"].dtype  # type: ignore[union-attr]
        return "" if fits and same else "index_copy of this form has no kernel in qcore_cpu"
    source = node.args[1].meta["val"]  # type: ignore[union-attr]
    if (source.dtype in FLOATS) != (result.dtype in FLOATS) and result.dtype not in FLOATS:
        return "copy of floats to integers has no kernel in qcore_cpu"
    return ""


def _why_not_elementwise(node: fx.Node, name: str) -> str:
    result, found = node.meta["val"], operands(node)
    values = [one.meta["val"] if isinstance(one, fx.Node) else one for one in found]
    dtypes = {one.dtype for one in values if isinstance(one, Tensor)}
    refused = f"{name} of this form has no kernel in qcore_cpu"
    if any(not isinstance(one, (Tensor, int, float)) for one in values) or node.kwargs.get("rounding_mode"):
        return refused
    if {"memory_format", "layout"} & {key for key, value in node.kwargs.items() if value not in _USUAL}:
        return refused
    if in_integers(node):
        arithmetic = name not in COMPARISONS and not name.startswith(("logical", "bitwise")) and len(values) < 3
        alone = arithmetic and ELEMENTWISE[name] is not Operation.IDENTITY and torch.bool in {result.dtype, *dtypes}
        mixed = name in _BITWISE and {result.dtype, *dtypes} != {torch.bool}
        return refused if alone or mixed or ELEMENTWISE[name] not in IN_INTEGERS or name == "pow" else ""
    compared = name in COMPARISONS or name.startswith("logical")
    if result.dtype not in FLOATS and not compared:
        return refused
    return refused if name in COMPARISONS and len(dtypes) > 1 else ""


_USUAL = (None, torch.strided, torch.preserve_format, torch.contiguous_format)


def _tensors(node: fx.Node) -> list[Tensor]:
    """The fake tensors that a node takes and gives, but for weights of layers."""
    skipped: Any = None
    if is_whole(node.target):
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr] # noqa: SLF001
        skipped = node.args[names.index("weight")] if "scheme" in names else None
    values = [node.meta.get("val"), *(one.meta.get("val") for one in node.all_input_nodes if one is not skipped)]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
