"""Weights of a checkpoint on their way into layers: read when a layer takes a part, forgotten with the last view."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import qcore
from qcore import QTensor, Scheme, UnsupportedError

from .views import WeightView
from .windows import Window


@dataclass
class Notes:
    """What a load has to tell. ``dense``: quantized weights that a layer took as floats."""

    dense: set[str] = field(default_factory=set)


@dataclass
class Stored:
    """One weight of a checkpoint.

    **Fields:** ``name``: in the checkpoint, without ``.weight``; ``shape``: ``(N, K)`` or ``(E, N, K)``; ``dtype``: of
    its views; ``scheme``: of a quantized weight, None for a float one; ``read``: reads it; ``flipped``: whether loaders
    see it as ``(K, N)``, as its float checkpoint stores it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scheme: Scheme | None
    read: Callable[[], QTensor | Tensor]
    notes: Notes
    flipped: bool = False
    _value: QTensor | Tensor | None = None

    def value(self) -> QTensor | Tensor:
        """The weight, read once. Raises `CheckpointError` for a damaged one."""
        if self._value is None:
            self._value = self.read()
        return self._value

    def view(self) -> StoredView:
        """All of it, as a tensor that loaders can cut."""
        return StoredView.of(self, Window.whole(self.shape, flipped=self.flipped))

    def quantized(self, window: Window, expert: int, scheme: Scheme | None, like: Tensor) -> QTensor | Tensor:
        """The part in a window, of one expert: as stored, or quantized by ``scheme``, None for dense.

        ``like``: a tensor of the layer's device and dtype. A float weight is cast to it first, as in a model.
        Rows are cut before they are quantized, columns afterwards: scales are the same for any number of ranks.
        """
        value: Any = self.value()
        one: QTensor | Tensor = value[expert] if len(self.shape) == 3 else value
        if isinstance(one, QTensor):
            return cut_columns(_rows(one, *window.rows).to(like.device), *window.columns, self.name)
        if scheme is None:
            return one.narrow(0, *window.rows).narrow(1, *window.columns).to(like)
        return quantized_rows(one.to(like), window, scheme, self.name)

    def dense(self, window: Window) -> Tensor:
        """The values in a window; noted for a quantized weight."""
        value = self.value()
        if not isinstance(value, QTensor):
            part: Tensor = value
            for dim, (start, length) in enumerate(zip(window.starts, window.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            return part.reshape(window.shape)
        self.notes.dense.add(self.name)
        experts = [value[e] for e in window.experts] if len(self.shape) == 3 else [value]
        parts = [_rows(one, *window.rows).dequantize(torch.float32) for one in experts]
        start, length = window.columns
        dense = torch.stack([p.narrow(1, start, length) for p in parts]).to(self.dtype)
        return (dense.mT if window.flipped else dense).reshape(window.shape)


class StoredView(WeightView):
    """A part of a `Stored` weight, as vLLM's loaders see it: a tensor in the model's dtype."""

    stored: Stored

    @classmethod
    def of(cls, stored: Stored, window: Window) -> StoredView:
        """The part of ``stored`` in a window."""
        made: StoredView = cls._make(window, stored.dtype, torch.device("cpu"), stored=stored)
        return made

    def part(self, window: Window) -> StoredView:
        return StoredView.of(self.stored, window)

    def dense(self) -> Tensor:
        return self.stored.dense(self.window)


def quantized_rows(dense: Tensor, window: Window, scheme: Scheme, name: str) -> QTensor:
    """Quantize the rows of a window, and cut its columns."""
    whole = scheme.weight.scale.has_global  # all rows share one number
    rows = dense if whole else dense.narrow(0, *window.rows)
    weight = qcore.quantize(rows, scheme.weight, scheme.quantizer, name=name)
    return cut_columns(_rows(weight, *window.rows) if whole else weight, *window.columns, name)


def _rows(weight: QTensor, start: int, length: int) -> QTensor:
    return weight if length == weight.shape[-2] else weight.narrow(-2, start, length)


def cut_columns(weight: QTensor, start: int, length: int, name: str) -> QTensor:
    """Columns of a weight. A cut inside a group makes groups finer, which is exact.

    Every rank cuts at multiples of one length, so all get groups of one size. Raises `UnsupportedError` for a weight
    whose columns are in an order of their own (act-order): those of a group are spread over all ranks.
    """
    k = weight.shape[-1]
    if length == k:
        return weight
    if weight.order is not None:
        raise UnsupportedError(
            f"{name}: its columns are sorted by group (act-order); tensor-parallel ranks cannot split them.\n"
            f"Serve it with tensor_parallel_size=1, use pipeline parallelism, or get the checkpoint without desc_act."
        )
    group = weight.format.group_size
    if group is not None and (start % group or length % group):
        weight = weight.regroup(math.gcd(group, start, length))
    return weight.narrow(-1, start, length)
