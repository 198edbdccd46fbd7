"""Rules of products in floats, attention, norms and rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...steps import Ends
from ...steps.attention import attention
from ...steps.norms import layer_norm, rms_norm
from ...steps.operand import Operand
from ...steps.pointwise import binary
from ...steps.products import dense, grouped, matmul
from ...steps.rope import rope
from ..lowering import GROUPED, Lowering
from .fusing import Prologue, cached, deferred
from .registry import rule


def _why_not_integers(node: fx.Node) -> str:
    dtype = node.meta["val"].dtype
    return "" if dtype.is_floating_point else f"products of {dtype} have no kernel in qcore_vulkan"


@rule("qcore_graph.dense", why_not=_why_not_integers)
def _dense(c: Lowering, node: fx.Node, x: Operand, weight: Operand, bias: Operand | None) -> Operand:
    return dense(c.b, x, weight, bias)


@rule("mm", "bmm", why_not=_why_not_integers)
def _mm(c: Lowering, node: fx.Node, x: Operand, y: Operand) -> Operand:
    if len(x.shape) == 3:
        return matmul(c.b, x, y)
    return matmul(c.b, x.unsqueeze(0), y.unsqueeze(0)).select(0, 0)


@rule("addmm", why_not=_why_not_integers)
def _addmm(
    c: Lowering, node: fx.Node, added: Operand, x: Operand, y: Operand, *, beta: Any = 1, alpha: Any = 1
) -> Operand:
    product = _mm(c, node, x, y)
    product = product if alpha == 1 else binary(c.b, "mul", product, float(alpha))
    if beta == 0:
        return product
    return binary(c.b, "add", product, added if beta == 1 else binary(c.b, "mul", added, float(beta)))


_MOST_ROWS = 1 << 17
"""Of experts in a launch: a tile has four or more, on average half of which are used."""


def _why_not_sorted(node: fx.Node) -> str:
    """Products of rows sorted by expert have a kernel; those of other groups, and with a bias, have none."""
    target: Any = node.target
    if target.namespace not in ("aten", "transformers"):
        return f"{target} has no kernel in qcore_vulkan"
    sizes = [one.meta["val"].dim() for one in node.args[:2] if isinstance(one, fx.Node)]
    more = [*node.args[3:], *(value for name, value in node.kwargs.items() if name != "offs")]
    if sizes != [2, 3] or _ends(node) is None or any(value is not None for value in more):
        return "grouped products have a kernel for rows that ends part, without a bias and another dtype"
    rows = node.meta["val"].shape[0]
    return _why_not_integers(node) or (f"{rows} rows of experts exceed a launch" if rows > _MOST_ROWS else "")


def _ends(node: fx.Node) -> Any:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("offs")


@rule(*GROUPED, why_not=_why_not_sorted)
def _grouped_mm(c: Lowering, node: fx.Node, x: Operand, weight: Operand, *_: Any, **__: Any) -> Operand:
    ends = c.ends(_ends(node), x.shape[0])
    return grouped(c.b, x, weight, Ends(ends.ref, ends.numel, biased=False))


@rule("qcore_graph.attention")
def _attention(
    c: Lowering, node: fx.Node, q: Operand, k: Operand, v: Operand, mask: Operand | None, causal: bool, scale: Any
) -> Operand:
    if mask is not None and mask.dtype != torch.bool:
        mask = c.cast(mask, torch.float32)
    if mask is not None:
        mask = mask.broadcast_to((*q.shape[:3], k.shape[2]))
    return attention(c.b, q, k, v, mask, causal, scale)


@rule("qcore_graph.rms_norm")
def _rms_norm(c: Lowering, node: fx.Node, x: Operand, weight: Operand | None, eps: float) -> Operand | Prologue:
    return deferred(c, node, "rms_norm", x, weight, eps) or rms_norm(c.b, x, weight, eps)


@rule("qcore_graph.layer_norm")
def _layer_norm(
    c: Lowering, node: fx.Node, x: Operand, weight: Operand | None, bias: Operand | None, eps: float
) -> Operand:
    return layer_norm(c.b, x, weight, bias, eps)


@rule("qcore_graph.rope")
def _rope(c: Lowering, node: fx.Node, x: Operand, cos: Operand, sin: Operand) -> Any:
    shape = tuple(node.meta["val"].shape)
    views = tuple(one.broadcast_to(shape) for one in (x, cos, sin))
    return views if cached(node) is not None else rope(c.b, *views)
