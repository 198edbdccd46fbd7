"""GGUF, the format of llama.cpp: its tensors with the names and row order of transformers' models.

Types are per tensor. The rows of q and k are permuted in models of the architecture ``llama`` (Mistral and Mixtral,
too); gemma's norms are stored plus one; the experts of a layer are one tensor. See `gguf_blocks` for the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from ..gguf_header import GGUFHeader, GGUFTensor
from ..header import Entry, file_error
from .base import ForeignTensor, ForeignWeight, LayerRefused, Plan, Read, plan_layers
from .gguf_blocks import READ_TYPES, BlockType

PLAIN_TYPES = {0: torch.float32, 1: torch.float16, 24: torch.int8, 25: torch.int16, 26: torch.int32, 30: torch.bfloat16}
"""Types of tensors that are not quantized, by their numbers."""
PLAIN_KINDS = {dtype: kind for kind, dtype in PLAIN_TYPES.items()}
"""Their numbers."""
TYPE_NAMES = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K",
    14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Names of the types of blocks, by their numbers."""
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
ARCHITECTURES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3moe", "gemma"), _LAYER),
    "gemma2": {**_LAYER, **_GEMMA},
    "gemma3": {**_LAYER, **_GEMMA},
    "phi3": {**_LAYER, **_PHI},
}
"""Names of the parts of a layer in transformers by those in GGUF, by architecture."""
PERMUTED = ("llama", "mistral")
"""Architectures whose rows of q and k are permuted."""
_PART = re.compile(r"blk\.([0-9]{1,4})\.([a-z_]+)\.(weight|bias)")
UNUSED_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that transformers computes from the configuration."""
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def row_bytes(tensor: GGUFTensor, path: Path) -> int:
    """Bytes of one row; 0 for unknown types, which the plan refuses. Raises `CheckpointError`."""
    plain = PLAIN_TYPES.get(tensor.kind)
    if plain is not None:
        return tensor.shape[-1] * plain.itemsize
    block = READ_TYPES.get(TYPE_NAMES.get(tensor.kind, ""))
    if block is None:
        return 0
    if tensor.shape[-1] % block.columns:
        what = f"its rows have {tensor.shape[-1]} columns, not a multiple of the {block.columns} columns of a block."
        raise file_error(path, what, tensor=tensor.name)
    return tensor.shape[-1] // block.columns * block.nbytes


def plan_gguf(header: GGUFHeader, entries: Mapping[str, Entry], path: Path) -> Plan:
    """Describe the weights of a file. Raises `CheckpointError` for an unknown architecture."""
    arch = header.metadata.get("general.architecture")
    names = ARCHITECTURES.get(arch) if isinstance(arch, str) else None
    if names is None:
        known = ", ".join(ARCHITECTURES)
        what = f"its architecture is {str(arch)[:40]!r}; qcore supports {known}."
        raise file_error(path, what, "Get the model as safetensors, or load another file.")
    assert isinstance(arch, str)
    job = _Job(arch, names, header, entries)
    plan = plan_layers(header.tensors, job.plan_one)
    plan.add(plan_layers(job.experts, job.plan_experts))
    return plan


@dataclass
class _Job:
    """One file. ``experts``: layer to the names of its tensors of experts, by the last part of the name."""

    arch: str
    names: Mapping[str, str]
    header: GGUFHeader
    entries: Mapping[str, Entry]
    experts: dict[str, dict[str, str]] = field(default_factory=dict)

    def plan_one(self, name: str, plan: Plan) -> None:
        """Plan one tensor."""
        if name in UNUSED_TENSORS:
            plan.dropped.add(name)
            return
        target, part = self._target(name)
        if part in _EXPERTS:
            self.experts.setdefault(target, {})[part] = name
            return
        tensor, entry = self.header.tensors[name], self.entries[name]
        arrange = self._arrange(part, tensor.shape[0])
        if tensor.kind not in PLAIN_TYPES:
            block = self._block(tensor)
            if len(tensor.shape) != 2:
                raise LayerRefused(f"it is quantized and has shape {tensor.shape}")
            n, k = tensor.shape
            plan.weights.append(
                ForeignWeight(
                    target, (n, k), Scheme(block.format), (name,), lambda read: block.build(arrange(read(name))),
                    block.scale_dtype,
                )
            )  # fmt: skip
            return
        shift = 1.0 if self.arch.startswith("gemma") and target.endswith("norm.weight") else 0.0
        dtype = torch.float32 if shift else entry.dtype

        def build(read: Read) -> Tensor:
            value = arrange(read(name))
            return value.float() - shift if shift else value

        plan.tensors.append(ForeignTensor(target, dtype, entry.shape, (name,), build))

    def plan_experts(self, target: str, plan: Plan) -> None:
        """Plan the experts of one layer: gate and up are one weight in transformers' models."""
        parts = self.experts[target]
        if set(parts) != set(_EXPERTS):
            raise LayerRefused(f"of its experts only {', '.join(sorted(parts))} are present")
        gate, up, down = (self.header.tensors[parts[part]] for part in _EXPERTS)
        if any(len(t.shape) != 3 for t in (gate, up, down)) or gate.shape != up.shape or gate.kind != up.kind:
            raise LayerRefused("its experts' gate and up have different shapes or types")
        for which, tensors in (("gate_up_proj", (gate, up)), ("down_proj", (down,))):
            self._plan_stacked(f"{target}.{which}", tensors, plan)

    def _plan_stacked(self, parameter: str, tensors: tuple[GGUFTensor, ...], plan: Plan) -> None:
        first = tensors[0]
        e, n, k = first.shape
        names = tuple(tensor.name for tensor in tensors)
        shape = (e, n * len(tensors), k)
        if first.kind in PLAIN_TYPES:
            plan.tensors.append(
                ForeignTensor(
                    parameter, PLAIN_TYPES[first.kind], shape, names,
                    lambda read: torch.cat([read(name) for name in names], dim=1),
                )
            )  # fmt: skip
            return
        block = self._block(first)

        def build(read: Read) -> QTensor:
            raw = torch.cat([read(name) for name in names], dim=1)
            return QTensor.stack([block.build(expert) for expert in raw])

        weight = ForeignWeight(f"{parameter}.weight", shape, Scheme(block.format), names, build, block.scale_dtype)
        plan.weights.append(weight)

    def _target(self, name: str) -> tuple[str, str]:
        """The name in transformers and the part of the layer; for experts the name of their module."""
        base, _, kind = name.rpartition(".")
        if base in _WHOLE and kind in ("weight", "bias"):
            return f"{_WHOLE[base]}.{kind}", base
        match = _PART.fullmatch(name)
        if match is not None and match[2] in _EXPERTS and match[3] == "weight":
            return f"model.layers.{int(match[1])}.mlp.experts", match[2]
        if match is None or match[2] not in self.names:
            raise LayerRefused(f"models of the architecture {self.arch} have no such tensor")
        return f"model.layers.{int(match[1])}.{self.names[match[2]]}.{match[3]}", match[2]

    def _block(self, tensor: GGUFTensor) -> BlockType:
        kind = TYPE_NAMES.get(tensor.kind, f"number {tensor.kind}")
        if kind not in READ_TYPES:
            raise LayerRefused(f"its type is {kind}; qcore reads {', '.join(READ_TYPES)}")
        return READ_TYPES[kind]

    def _arrange(self, part: str, rows: int) -> Callable[[Tensor], Tensor]:
        """The function that permutes the rows of a tensor to transformers' order."""
        if self.arch not in PERMUTED or part not in ("attn_q", "attn_k"):
            return lambda value: value
        every = f"{self.arch}.attention.head_count"
        key = every if part == "attn_q" else f"{every}_kv"
        heads = self.header.metadata.get(key, self.header.metadata.get(every))
        if type(heads) is not int or heads < 1 or rows % (2 * heads):
            raise LayerRefused(f"{key} is {str(heads)[:20]}, which does not divide its {rows} rows")
        # llama.cpp rotates neighbouring rows, transformers the two halves of a head.
        split = (heads, rows // heads // 2, 2)
        return lambda value: value.reshape(*split, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
