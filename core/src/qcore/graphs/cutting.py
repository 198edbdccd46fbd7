"""Cuts a captured graph into the largest parts that the device runs and the nodes that stay on the host."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions
from torch.utils import _pytree as pytree

from . import folding
from .backends import GraphBackend

PART = "device_part_"
"""Names of submodules that hold the parts of a cut graph start with this."""


class _Supported(OperatorSupportBase):
    def __init__(self, reasons: Mapping[fx.Node, str]) -> None:
        self._reasons = reasons

    def is_node_supported(self, submodules: Mapping[str, Any], node: fx.Node) -> bool:  # noqa: ARG002 - torch's interface
        return node.op == "call_function" and not self._reasons.get(node)


def cut(module: fx.GraphModule, backend: GraphBackend, device: torch.device) -> dict[str, str]:
    """Replace what ``backend`` runs by submodules named `PART` + number, in place.

    Parts are maximal, and none depends on the host in between; their tensors are on ``device``. Returns the nodes left
    to the host by name, each with the reason; constants among them are computed once, now.
    """
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    reasons = {node: why for node in calls if (why := _why_not(node, backend, device))}
    for gone in folding.fold(module, reasons):
        reasons.pop(gone, None)
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    if reasons:
        partitioner = CapabilityBasedPartitioner(module, _Supported(reasons), allows_single_node_partition=True)
        groups = [list(found.nodes) for found in partitioner.propose_partitions()]
    else:
        groups = [calls] if calls else []
    left = {node.name: why for node, why in reasons.items()}
    fewest = backend.fewest_nodes()
    small = (node.name for nodes in groups if len(nodes) < fewest for node in nodes)
    left |= dict.fromkeys(small, f"a part has at least {fewest} nodes")
    kept = [dict.fromkeys(nodes) for nodes in groups if len(nodes) >= fewest]
    fuse_by_partitions(module, kept, prefix=PART, always_return_tuple=True)
    module.recompile()
    return left


def _why_not(node: fx.Node, backend: GraphBackend, device: torch.device) -> str:
    if node.target is operator.getitem:  # belongs to the op that returns the tuple
        source = node.args[0]
        return _why_not(source, backend, device) if isinstance(source, fx.Node) else "it reads no tuple of a node"
    elsewhere = next((t.device for t in _tensors(node) if t.device != device), None)
    if elsewhere is not None:
        return f"it works on {elsewhere}, the graph on {device}"
    return backend.why_not(node)


def _tensors(node: fx.Node) -> list[Tensor]:
    """The fake tensors that a node takes and gives."""
    values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
