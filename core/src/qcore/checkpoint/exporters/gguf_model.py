"""The metadata of a model in GGUF: architecture and sizes by llama.cpp's keys, from transformers' ``config.json``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import QcoreWarning
from ..header import file_error
from ..model_config import CONFIG

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
"""GGUF's name of the architecture, by ``model_type``."""
_GELU = ("gemma", "gemma2", "gemma3")
_WINDOWED = ("phi3", "gemma2", "gemma3")


@dataclass(frozen=True)
class Model:
    """``arch``; ``values``: by key without the architecture; ``heads``: by part of the layer; ``tensors``: to add."""

    arch: str
    values: Mapping[str, int | float | str]
    heads: Mapping[str, int]
    layers: int
    tensors: Mapping[str, Tensor]
    vocabulary: int
    tied: bool


def describe_model(config: Mapping[str, Any], path: Path) -> Model:
    """Describe a model of transformers. Raises `CheckpointError` for properties that GGUF cannot express."""
    return _Reader(config, path).model()


class _Reader:
    """Reads one ``config.json``."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self.config, self.path = config, path / CONFIG
        kind = config.get("model_type")
        if kind not in ARCHITECTURES:
            raise self._refused(f"its model_type is {str(kind)[:40]!r}; qcore writes {', '.join(ARCHITECTURES)}")
        self.kind, self.arch = str(kind), ARCHITECTURES[str(kind)]
        self.hidden, self.heads = self.size("hidden_size"), self.size("num_attention_heads")
        self.kv_heads = self.size("num_key_value_heads", self.heads)
        self.head = self.size("head_dim", self.hidden // self.heads)
        self.context = self.size("max_position_embeddings")

    def _refused(self, what: str) -> Exception:
        return file_error(self.path, f"{what}.", "Write it in another format, e.g. --to gptq.")

    def size(self, key: str, default: int | None = None) -> int:
        found = self.config.get(key)
        found = default if found is None else found
        if type(found) is not int or found < 1:
            raise self._refused(f"its {key} is {str(found)[:40]!r}, not a positive integer")
        return found

    def number(self, key: str, default: float | None = None, place: Mapping[str, Any] | None = None) -> float:
        found = (self.config if place is None else place).get(key)
        found = default if found is None else found
        if type(found) not in (int, float) or not math.isfinite(found):  # type: ignore[arg-type]
            raise self._refused(f"its {key} is {str(found)[:40]!r}, not a number")
        return float(found)  # type: ignore[arg-type]

    def model(self) -> Model:
        self._check_activation()
        values: dict[str, int | float | str] = {
            "context_length": self.context,
            "embedding_length": self.hidden,
            "block_count": self.size("num_hidden_layers"),
            "feed_forward_length": self.size("intermediate_size"),
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head,
            "attention.value_length": self.head,
            "attention.layer_norm_rms_epsilon": self.number("rms_norm_eps"),
            "vocab_size": self.size("vocab_size"),
        }
        values |= self._experts() | self._window() | self._caps()
        rope, tensors = self._rope()
        tied = self.config.get("tie_word_embeddings", self.arch in _GELU) is True
        heads = {"attn_q": self.heads, "attn_k": self.kv_heads}
        layers = self.size("num_hidden_layers")
        return Model(self.arch, values | rope, heads, layers, tensors, self.size("vocab_size"), tied)

    def _check_activation(self) -> None:
        found = self.config.get("hidden_activation") or self.config.get("hidden_act")
        wanted = ("gelu_pytorch_tanh", "gelu") if self.arch in _GELU else ("silu",)
        if found is not None and found not in wanted:
            raise self._refused(
                f"its activation is {str(found)[:40]!r}; llama.cpp computes {wanted[0]} for {self.arch}"
            )
        scalar = self.config.get("query_pre_attn_scalar")
        if scalar is not None and scalar not in (self.head, self.hidden / self.heads):
            raise self._refused(f"its query_pre_attn_scalar is {scalar}; llama.cpp uses the head size, {self.head}")

    def _experts(self) -> dict[str, int | float | str]:
        if self.kind == "mixtral":
            return {
                "expert_count": self.size("num_local_experts"),
                "expert_used_count": self.size("num_experts_per_tok"),
            }
        if self.kind != "qwen3_moe":
            return {}
        if self.config.get("norm_topk_prob") is not True:
            raise self._refused("its norm_topk_prob is not true, but llama.cpp assumes that it is")
        if self.config.get("mlp_only_layers") or self.config.get("decoder_sparse_step", 1) != 1:
            raise self._refused("some of its layers have no experts")
        return {
            "expert_count": self.size("num_experts", self.config.get("num_local_experts")),
            "expert_used_count": self.size("num_experts_per_tok"),
            "expert_feed_forward_length": self.size("moe_intermediate_size"),
        }

    def _window(self) -> dict[str, int | float | str]:
        window = self.config.get("sliding_window")
        used = self.config.get("use_sliding_window", True) is not False
        if not window or not used or self.arch == "gemma":
            return {}
        if self.arch in _WINDOWED:
            self._check_layers()
            return {"attention.sliding_window": self.size("sliding_window")}
        if window < self.context:
            what = f"{self.path}: llama.cpp has no sliding window for {self.arch}"
            warnings.warn(f"{what}; results differ beyond {window} tokens.", QcoreWarning, stacklevel=2)
        return {}

    def _check_layers(self) -> None:
        """Check that the layers with a window are those that llama.cpp assumes."""
        every = {"gemma2": 2, "gemma3": 6}.get(self.arch)
        found = self.config.get("layer_types")
        if every is None or not isinstance(found, list):
            return
        full = [place for place, kind in enumerate(found) if kind == "full_attention"]
        if full != list(range(every - 1, len(found), every)):
            raise self._refused(f"its layer_types differ from those of {self.arch}: every {every}th has full attention")

    def _caps(self) -> dict[str, int | float | str]:
        kinds = ("attn_logit_softcapping", "final_logit_softcapping")
        found = {key: self.number(key) for key in kinds if self.config.get(key) is not None}
        if found and self.arch != "gemma2":
            raise self._refused(f"it has {', '.join(found)}, which llama.cpp supports for gemma2 only")
        return dict(found)

    def _rope(self) -> tuple[dict[str, int | float | str], dict[str, Tensor]]:
        """The keys of the rotary embedding, and the tensors of its factors."""
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        found: dict[str, int | float | str] = {}
        if "full_attention" in rope:
            local = rope.get("sliding_attention") or {}
            found["rope.freq_base_swa"] = self.number("rope_theta", 10000.0, local)
            rope = rope["full_attention"]
        elif self.arch == "gemma3":
            found["rope.freq_base_swa"] = self.number("rope_local_base_freq", 10000.0)
        default = self.number("rope_theta", 1e6 if self.arch == "gemma3" else 1e4)
        partial = self.number("partial_rotary_factor", self.number("partial_rotary_factor", 1.0), rope)
        found["rope.freq_base"] = base = self.number("rope_theta", default, rope)
        found["rope.dimension_count"] = dims = int(self.head * partial)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in (None, "default"):
            return found, {}
        if kind == "linear":
            return found | {"rope.scaling.type": "linear", "rope.scaling.factor": self.number("factor", None, rope)}, {}
        if kind == "yarn":
            return found | self._yarn(rope), {}
        if kind == "llama3":
            return found, {"rope_freqs.weight": self._llama3(rope, base, dims)}
        if kind == "longrope" and self.arch == "phi3":
            return self._longrope(rope, found)
        raise self._refused(
            f"its rope_type is {str(kind)[:40]!r}; qcore writes linear, yarn, llama3 and phi3's longrope"
        )

    def _yarn(self, rope: Mapping[str, Any]) -> dict[str, int | float | str]:
        if unknown := [key for key in ("mscale", "mscale_all_dim", "attention_factor") if rope.get(key) is not None]:
            raise self._refused(f"its yarn has {', '.join(unknown)}, which GGUF cannot express")
        original = int(self.number("original_max_position_embeddings", self.context, rope))
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": self.number("factor", None, rope),
            "rope.scaling.original_context_length": original,
            "rope.scaling.yarn_beta_fast": self.number("beta_fast", 32.0, rope),
            "rope.scaling.yarn_beta_slow": self.number("beta_slow", 1.0, rope),
        }

    def _llama3(self, rope: Mapping[str, Any], base: float, dims: int) -> Tensor:
        """The divisor of each frequency, float32 ``(dims / 2,)``: 1 for high ones, the factor for low ones."""
        factor = self.number("factor", None, rope)
        low, high = self.number("low_freq_factor", 1.0, rope), self.number("high_freq_factor", 4.0, rope)
        old = self.number("original_max_position_embeddings", 8192, rope)
        turns = old / (2 * math.pi * base ** (torch.arange(0, dims, 2, dtype=torch.float64) / dims))
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 / ((1 - smooth) / factor + smooth)).float()

    def _longrope(
        self, rope: Mapping[str, Any], found: dict[str, int | float | str]
    ) -> tuple[dict[str, int | float | str], dict[str, Tensor]]:
        original = self.number("original_max_position_embeddings", None, {**self.config, **rope})
        tensors, half = {}, int(found["rope.dimension_count"]) // 2
        for key in ("long", "short"):
            values = rope.get(f"{key}_factor")
            if not isinstance(values, list) or len(values) != half:
                raise self._refused(f"its rope does not have {half} numbers in {key}_factor")
            tensors[f"rope_factors_{key}.weight"] = torch.tensor(values, dtype=torch.float32)
        scale = self.context / original
        attention = rope.get("attention_factor") or (
            math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1
        )
        found |= {"rope.scaling.original_context_length": int(original), "rope.scaling.attn_factor": float(attention)}
        return found, tensors
