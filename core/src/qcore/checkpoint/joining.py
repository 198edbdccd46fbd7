"""Read weights of single experts into the tensors of all experts of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Format
from ..weights.qtensor import QTensor
from .archive import Archive
from .expert_names import Rows
from .importers.base import Read


def join_float(rows: Rows, dtype: torch.dtype, shape: tuple[int, int], transposed: bool, read: Read) -> Tensor:
    """Read float tensors ``(n, K)`` into one ``(E, *shape)``: ``(N, K)`` for each expert, or ``(K, N)``."""
    whole = torch.empty(len(rows), *shape, dtype=dtype)
    for expert, row in zip(whole, rows, strict=True):
        target = expert.t() if transposed else expert
        for part, name in zip(target.split(target.shape[0] // len(row)), row, strict=True):
            part.copy_(read(name))
    return whole


def join_biases(rows: Rows, read: Read) -> Tensor:
    """Read biases ``(n,)`` into one ``(E, N)``."""
    return torch.stack([torch.cat([read(name) for name in row]) for row in rows])


def join_quantized(archive: Archive, rows: Rows, like: Format, shape: tuple[int, ...], order: bool, _: Read) -> QTensor:
    """Read the experts one by one into the joined tensors, so that there is never a second copy of them."""
    whole: dict[str, Tensor] = {}
    weight = None
    for number, row in enumerate(rows):
        weight = QTensor.cat([_alike(archive.quantized(archive.aliases.get(n, n)), like, order) for n in row])
        for name, tensor in weight.tensors().items():
            if number == 0:
                whole[name] = tensor.new_empty((len(rows), *tensor.shape))
            whole[name][number].copy_(tensor)
    assert weight is not None
    return weight.derived(**whole, shape=shape)


def _alike(weight: QTensor, like: Format, order: bool) -> QTensor:
    """The weight with float scales, zero points and an order if others have them; it dequantizes to the same values."""
    changes: dict[str, object] = {"format": like}
    if weight.format.scale is not like.scale:
        changes |= {"scale": weight.scales(), "global_scale": None}
    if weight.format.zero is not like.zero:
        changes["zero"] = torch.zeros(weight.scale.shape, dtype=torch.int8)
    if order and weight.order is None:
        changes["order"] = torch.arange(weight.shape[1], dtype=torch.int32)
    return weight.derived(**changes)
