"""The tensors of a checkpoint, one by one, under the names that vLLM's models load."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qcore.plugin_api import Archive

from .stored import Stored

if TYPE_CHECKING:
    from .config import QcoreConfig

_FUSED = re.compile(r"(?P<layer>.*\.experts)\.(?P<which>gate_up_proj|up_proj|down_proj)(?:\.weight)?")
_FLIPPED = {"gpt2": re.compile(r".*\.(?:c_attn|c_proj|c_fc)\.weight"), "gpt_oss": _FUSED}
"""Weights that vLLM transposes, by type of model."""
_FUSED_BIAS = re.compile(r"(\.experts\.(?:gate_up_proj|up_proj|down_proj))\.bias$")


def stream(archive: Archive, model: nn.Module, dtype: torch.dtype, config: QcoreConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor: quantized weights as views, and float ones too if weights are quantized at load.

    ``dtype``: that the model computes in. Tensors of one module follow each other.
    """
    numbers = {name for record in archive.records for names in _calibrated(archive, record) for name in names}
    names = _Names.of(model)
    for name in sorted({*archive.records, *archive.plain_names()} - numbers - _tied_heads(archive, model)):
        if name in archive.records:
            tensor = _quantized(archive, name, dtype, config, flipped=names.is_flipped(name))
        else:
            tensor = _plain(archive, name, config)
        yield from names.renamed(name, tensor)


def _calibrated(archive: Archive, record: str) -> Iterator[list[str]]:
    for names in archive.calibrated_names(record).values():
        yield list(names.values())


def _tied_heads(archive: Archive, model: nn.Module) -> set[str]:
    """Heads that are stored with the embedding's table, for a model that ties them: some, as Gemma 2, have no head.

    transformers leaves such a head out of a float checkpoint.
    """
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return set()
    shared = {*archive.aliases, *archive.aliases.values()}
    return {name for name in shared if f".{name}".endswith(".lm_head.weight")}


def _quantized(archive: Archive, name: str, dtype: torch.dtype, config: QcoreConfig, *, flipped: bool) -> Tensor:
    record, layer = archive.records[name], name.removesuffix(".weight")
    read = partial(archive.quantized, name)
    return Stored(layer, record.shape, dtype, archive.scheme(name), read, config.notes, flipped).view()


def _plain(archive: Archive, name: str, config: QcoreConfig) -> Tensor:
    entry = archive.entry(name)
    if config.selection is None or len(entry.shape) not in (2, 3) or not entry.dtype.is_floating_point:
        return archive.read(name)
    layer = name.removesuffix(".weight")
    return Stored(layer, entry.shape, entry.dtype, None, partial(archive.read, name), config.notes).view()


@dataclass(frozen=True)
class _Names:
    """The names that vLLM's model loads, for those of transformers 5, which `qcore.hf` and `qcore.save` write.

    **Fields:** ``old_block``: whether blocks of experts are called ``block_sparse_moe``, as in Mixtral's files;
    ``flipped``: which weights vLLM transposes, because transformers stores them as ``(K, N)``; ``gate``,
    ``up``, ``down``: the weights of one expert; empty if the model has no experts, or fused transposed ones.
    """

    old_block: bool
    flipped: re.Pattern[str] | None = None
    gate: str = ""
    up: str | None = None
    down: str = ""

    @classmethod
    def of(cls, model: nn.Module) -> _Names:
        old = any(name.endswith(".block_sparse_moe") for name, _ in model.named_modules())
        experts: Any = next((module for module in model.modules() if hasattr(module, "ckpt_gate_proj_name")), None)
        flipped = _FLIPPED.get(getattr(getattr(model, "config", None), "model_type", ""))
        if experts is None or flipped is not None or experts.is_fused_checkpoint_transposed:
            return cls(old, _FUSED if flipped is None and experts is not None else flipped)
        return cls(old, None, experts.ckpt_gate_proj_name, experts.ckpt_up_proj_name, experts.ckpt_down_proj_name)

    def is_flipped(self, name: str) -> bool:
        """Whether vLLM transposes a weight."""
        return self.flipped is not None and self.flipped.fullmatch(name) is not None

    def renamed(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a tensor under the model's name, fused experts one by one."""
        name = _FUSED_BIAS.sub(r"\1_bias", name)
        if self.old_block:
            name = name.replace(".mlp.experts.", ".block_sparse_moe.experts.", 1)
            name = re.sub(r"\.mlp\.(gate|router)\.", ".block_sparse_moe.gate.", name, count=1)
        found = _FUSED.fullmatch(name) if self.gate and tensor.dim() == 3 else None
        if found is None:
            yield name, tensor
            return
        for expert in range(tensor.shape[0]):
            for part, rows in self._rows(found["which"], tensor.shape[1]):
                yield f"{found['layer']}.{expert}.{part}.weight", tensor[expert].narrow(0, *rows)

    def _rows(self, which: str, n: int) -> list[tuple[str, tuple[int, int]]]:
        """The weights that a fused one holds: name, start and length along its N rows."""
        if which == "gate_up_proj":
            return [(self.gate, (0, n // 2)), (self.up or self.gate, (n // 2, n // 2))]
        return [(self.down if which == "down_proj" else self.gate, (0, n))]
