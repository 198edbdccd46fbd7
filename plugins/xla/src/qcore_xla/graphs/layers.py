"""The quantized layers of a part: how each is packed, and which are multiplied together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from qcore.plugin_api import GraphPart, Stamp, base_name, is_whole

from . import quantized
from .meshes import MeshCut
from .quantized import Arrays, Layer

Cuts = Mapping[fx.Node, MeshCut]
"""By the placeholder of a weight."""


def layer_of(node: fx.Node, platform: str, cuts: Cuts) -> Layer | None:
    """How the quantized layer of a node is packed; None for other nodes."""
    if not is_whole(node.target):
        return None
    name, args = base_name(node.target), node.args
    x = args[0].meta["val"] if isinstance(args[0], fx.Node) else None
    if name == "embedding":
        return quantized.layer(name, 0, args[3], args[2], 1, 0, platform)  # type: ignore[arg-type]
    if name == "linear":
        cut = cuts.get(args[1])  # type: ignore[arg-type]
        return quantized.layer(name, args[4], x.shape[-1], args[3], 1, 0, platform, cut)  # type: ignore[union-attr, arg-type]
    if name == "grouped_linear":
        experts = args[1].meta["val"].shape[0]  # type: ignore[union-attr]
        return quantized.layer(name, args[5], x.shape[-1], args[4], 1, experts, platform)  # type: ignore[union-attr, arg-type]
    if name == "conv2d":
        kernel, groups = args[5], args[9]
        k = kernel[0] * kernel[1] * x.shape[1] // groups  # type: ignore[index, operator, union-attr]
        return quantized.layer(name, args[4], k, args[3], groups, 0, platform)  # type: ignore[arg-type]
    return None


@dataclass(frozen=True)
class Siblings:
    """Linear layers of one x (queries, keys and values; gate and up) whose weights lie one after another.

    One product takes the place of several: fewer and larger programs on the device, fewer arrays in each call.
    """

    nodes: tuple[fx.Node, ...]
    layers: tuple[Layer, ...]

    @cached_property
    def whole(self) -> Layer:
        """The layer of all of them."""
        return replace(self.layers[0], n=sum(layer.n for layer in self.layers))

    @property
    def weights(self) -> tuple[fx.Node, ...]:
        """The weights' placeholders."""
        return tuple(node.args[1] for node in self.nodes)  # type: ignore[misc]


def siblings(part: GraphPart, platform: str, cuts: Cuts) -> list[Siblings]:
    """Those of a part, for one CPU or GPU, not for a mesh; each layer belongs to one at most."""
    if cuts or platform not in {"cpu", "cuda"}:
        return []
    found: dict[Any, list[tuple[fx.Node, Layer]]] = {}
    for node in part.nodes:
        layer = layer_of(node, platform, cuts)
        if layer is None or layer.kind != "linear" or layer.n % _WHOLE_ROWS:
            continue
        x, weight, bias, *_, dtype = node.args
        if bias is None and len(weight.users) == 1:  # type: ignore[union-attr]
            found.setdefault((x, replace(layer, n=0), dtype), []).append((node, layer))
    return [Siblings(*map(tuple, zip(*several, strict=True))) for several in found.values() if len(several) > 1]


_WHOLE_ROWS = 64
"""Weights with this multiple of rows are not padded, see `qcore_xla.packing`."""


def joined_tensors(parts: Sequence[dict[str, Tensor]], of: Layer) -> dict[str, Tensor]:
    """Packed weights, one after another along N."""
    axis = {"data": 0 if of.plan.by_rows else -1}  # parameters are ``(G, N)``
    return {name: torch.cat([part[name] for part in parts], axis.get(name, -1)) for name in parts[0]}


Made = Arrays | list[Arrays]
"""The arrays of all siblings in one, or of each if they cannot be joined: columns in an order of their own."""


class Together:
    """Values made of several tensors, each kept as long as these live and are not written to."""

    def __init__(self, make: Callable[[Sequence[Tensor], Siblings], Made]) -> None:
        self._make = make
        self._known: dict[Any, tuple[list[tuple[weakref.ref[Tensor], Stamp]], Made]] = {}

    def get(self, tensors: Sequence[Tensor], of: Siblings) -> Made:
        """The value for tensors."""
        key = (*map(id, tensors), of.layers)
        known = self._known.get(key)
        if known is not None and all(
            ref() is t and stamp.fits(t) for t, (ref, stamp) in zip(tensors, known[0], strict=True)
        ):
            return known[1]
        made = self._make(tensors, of)
        refs = [(weakref.ref(t, lambda ref: self._forget(key, ref)), Stamp(t)) for t in tensors]
        self._known[key] = refs, made
        return made

    def _forget(self, key: Any, ref: weakref.ref[Tensor]) -> None:
        known = self._known.get(key)
        if known is not None and any(ref is own for own, _ in known[0]):  # ids may belong to other tensors by now
            del self._known[key]
