"""A tiny language model twice: as a model of torch that qcore quantizes and saves, and as an engine's, rank by rank."""

from __future__ import annotations

from typing import Any

import torch
import vllm_stand_in as vllm
from parallel_models import ExpertWeights
from torch import Tensor, nn

import qcore
from qcore.nn import QuantizedExperts

D, HEADS, KV, HEAD, HIDDEN, VOCABULARY, EXPERTS = 96, 4, 2, 24, 144, 100, 4
"""72 columns of ``down_proj`` on each of two ranks are 2.25 groups of 32, 36 on each of four 1.125."""


def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each head with its key and value, in place of attention: no token depends on another one."""
    wide = [y.unflatten(-1, (-1, HEAD)).repeat_interleave(q.shape[-1] // y.shape[-1], -2).flatten(-2) for y in (k, v)]
    return torch.tanh(q) * wide[0] + wide[1]


def routed(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and numbers of each token's two experts."""
    scores = (x @ router.t()).softmax(-1)
    return scores.topk(2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(D, HEADS * HEAD), nn.Linear(HEADS * HEAD, D)
        self.k_proj, self.v_proj = nn.Linear(D, KV * HEAD), nn.Linear(D, KV * HEAD)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(mixed(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class Mlp(nn.Module):
    def __init__(self, moe: str) -> None:
        super().__init__()
        if moe:
            self.gate = nn.Linear(D, EXPERTS, False)
            made = ExpertWeights(EXPERTS, D, HIDDEN, bias=False, interleaved=False)
            self.experts: Any = QuantizedExperts.from_float(made, moe)
        else:
            self.gate_proj, self.up_proj, self.down_proj = (
                nn.Linear(D, HIDDEN), nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D),
            )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "experts"):
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        weights, ids = routed(x, self.gate.weight)
        return self.experts(x, ids, weights)


class Layer(nn.Module):
    def __init__(self, moe: str) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp(moe)


class Model(nn.Module):
    """Of torch. ``moe``: the scheme of experts in place of MLPs; ``tied``: the head is the embedding's table."""

    def __init__(self, moe: str = "", tied: bool = False) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, D)
        self.model.layers = nn.ModuleList(Layer(moe) for _ in range(2))
        self.lm_head = nn.Linear(D, VOCABULARY, False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = x + layer.self_attn(x)
            x = x + layer.mlp(x)
        return self.lm_head(x)


def model(moe: str = "", tied: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Model(moe, tied).eval().requires_grad_(False)


# The engine's.

STACKED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
           "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}  # fmt: skip


class EngineLayer(nn.Module):
    def __init__(self, config: Any, prefix: str, moe: bool, by_expert: bool, dtype: torch.dtype) -> None:
        super().__init__()
        where = f"{prefix}.self_attn"
        copies = max(1, vllm.PLACE.size // KV)
        rows = [HEADS * HEAD, KV * HEAD, KV * HEAD]
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.qkv_proj = vllm.MergedColumnParallelLinear(
            rows, D, True, config, f"{where}.qkv_proj", dtype, [1, copies, copies]
        )
        self.self_attn.o_proj = vllm.RowParallelLinear(D, HEADS * HEAD, True, config, f"{where}.o_proj", dtype)
        where = f"{prefix}.mlp"
        if moe:
            self.mlp.gate = nn.Linear(D, EXPERTS, False, dtype=dtype).requires_grad_(False)
            self.mlp.experts = vllm.RoutedExperts(
                EXPERTS, D, HIDDEN, config, f"{where}.experts", dtype, by_expert=by_expert
            )
        else:
            self.mlp.gate_up_proj = vllm.MergedColumnParallelLinear(
                [HIDDEN, HIDDEN], D, True, config, f"{where}.gate_up_proj", dtype
            )
            self.mlp.down_proj = vllm.RowParallelLinear(D, HIDDEN, True, config, f"{where}.down_proj", dtype)

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.self_attn.qkv_proj
        return self.self_attn.o_proj(mixed(*qkv(x).split(qkv.sizes, -1)))

    def feed_forward(self, x: Tensor) -> Tensor:
        if hasattr(self.mlp, "experts"):
            return self.mlp.experts(x, *routed(x, self.mlp.gate.weight))
        gate, up = self.mlp.gate_up_proj(x).chunk(2, -1)
        return self.mlp.down_proj(nn.functional.silu(gate) * up)


class EngineModel(nn.Module):
    """One rank's part."""

    def __init__(self, config: Any, moe: bool, tied: bool, by_expert: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = vllm.VocabParallelEmbedding(VOCABULARY, D, config, "model.embed_tokens", dtype)
        made = [EngineLayer(config, f"model.layers.{i}", moe, by_expert, dtype) for i in range(2)]
        self.model.layers = nn.ModuleList(made)
        self.lm_head = vllm.ParallelLMHead(VOCABULARY, D, config, "lm_head", dtype)
        self.tied = tied
        if tied:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)

    def load(self, name: str, tensor: Tensor) -> None:
        """Put one tensor of a checkpoint where it belongs."""
        if self.tied and name == "lm_head.weight":
            return
        path, _, kind = name.rpartition(".")
        parent, _, child = path.rpartition(".")
        if ".experts." in name:
            owner, _, rest = path.partition(".experts.")
            expert, _, which = rest.partition(".")
            experts = self.get_submodule(f"{owner}.experts")
            experts.weight_loader(
                experts.w2_weight if which == "w2" else experts.w13_weight, tensor, which, int(expert)
            )
            return
        child, shard = STACKED.get(child, (child, None))
        module = self.get_submodule(f"{parent}.{child}" if parent else child)
        parameter = getattr(module, kind)
        loader = getattr(parameter, "weight_loader", None)
        if loader is None:
            parameter.data.copy_(tensor)
        else:
            loader(parameter, tensor, *(() if shard is None else (shard,)))


def logits(ranks: list[EngineModel], ids: Tensor) -> Tensor:
    """What the ranks compute together: sums and a gather in place of collectives."""
    x: Any = sum(rank.model.embed_tokens(ids) for rank in ranks)
    for i in range(2):
        layers = [rank.model.layers[i] for rank in ranks]
        x = x + sum(layer.attention(x) for layer in layers)
        x = x + sum(layer.feed_forward(x) for layer in layers)
    return torch.cat([rank.lm_head(x) for rank in ranks], -1)[..., :VOCABULARY]


def saved(made: nn.Module, folder: Any) -> None:
    """A checkpoint of a model that is quantized already."""
    folder.mkdir()
    qcore.save(made, folder)
