"""The tensors of a checkpoint, one by one, under the names that vLLM's models load."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qcore.plugin_api import Archive

from .stored import Stored

if TYPE_CHECKING:
    from .config import QcoreConfig

_FUSED = re.compile(r"(\.experts\.(?:gate_up_proj|up_proj|down_proj))\.(weight|bias)$")


def stream(archive: Archive, model: nn.Module, dtype: torch.dtype, config: QcoreConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor: quantized weights as views, and float ones too if weights are quantized at load.

    ``dtype``: that the model computes in. Tensors of one module follow each other.
    """
    numbers = {name for record in archive.records for names in _calibrated(archive, record) for name in names}
    rename = _renaming(model)
    for name in sorted({*archive.records, *archive.plain_names()} - numbers):
        tensor = _quantized(archive, name, dtype, config) if name in archive.records else _plain(archive, name, config)
        yield rename(name), tensor


def _calibrated(archive: Archive, record: str) -> Iterator[list[str]]:
    for names in archive.calibrated_names(record).values():
        yield list(names.values())


def _quantized(archive: Archive, name: str, dtype: torch.dtype, config: QcoreConfig) -> Tensor:
    record, layer = archive.records[name], name.removesuffix(".weight")
    read = partial(archive.quantized, name)
    return Stored(layer, record.shape, dtype, archive.scheme(name), read, config.notes).view()


def _plain(archive: Archive, name: str, config: QcoreConfig) -> Tensor:
    entry = archive.entry(name)
    if config.selection is None or len(entry.shape) not in (2, 3) or not entry.dtype.is_floating_point:
        return archive.read(name)
    layer = name.removesuffix(".weight")
    return Stored(layer, entry.shape, entry.dtype, None, partial(archive.read, name), config.notes).view()


class _renaming:  # noqa: N801 - a function with settings
    """transformers 5's names of experts, as vLLM's models load them.

    Fused experts are parameters without ``.weight``; Mixtral's block of experts is ``block_sparse_moe`` in vLLM.
    """

    def __init__(self, model: nn.Module) -> None:
        self.old_block = any(name.endswith(".block_sparse_moe") for name, _ in model.named_modules())

    def __call__(self, name: str) -> str:
        name = _FUSED.sub(lambda found: found[1] + ("_bias" if found[2] == "bias" else ""), name)
        if not self.old_block:
            return name
        name = name.replace(".mlp.experts.", ".block_sparse_moe.experts.", 1)
        return re.sub(r"\.mlp\.(gate|router)\.", ".block_sparse_moe.gate.", name, count=1)
