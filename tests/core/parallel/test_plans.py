"""What `plan_for` leaves whole, because more than the layers that it knows would have to be cut with them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from parallel_models import Attention, Block, Mlp
from torch import nn

import qcore
from qcore.parallel import plan_for
from qcore.parallel.plans import units_for

ATTENTION = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
MLP = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


class _Normed(nn.Module):
    """One weight per head and feature, as in Cohere."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))


def _with(**members: object) -> nn.Module:
    """A block of 8 heads of 16 features, and 256 hidden features, with more in its attention."""
    block = Block()
    for name, member in members.items():
        setattr(block.self_attn, name, member)
    return block


WHOLE = {
    "a gate of the result": {"gate_proj": nn.Linear(128, 128)},
    "a gate per head": {"g_proj": nn.Linear(128, 8)},
    "a weight per head and feature": {"q_norm": _Normed(8, 16)},
    "a norm for each head": {"q_norm": nn.ModuleList(nn.LayerNorm(16) for _ in range(8))},
    "differences of heads": {"lambda_q1": nn.Parameter(torch.zeros(16))},
    "a table of positions and heads": {"table": nn.Parameter(torch.zeros(9, 8))},
}
CUT = {
    "a norm of a head": {"q_norm": nn.LayerNorm(16), "k_norm": nn.RMSNorm(16)},
    "a sink per head": {"sinks": nn.Parameter(torch.zeros(8))},
    "a bias per head": {"relative_attention_bias": nn.Embedding(32, 8)},
    "distances in a head": {"distance_embedding": nn.Embedding(32, 16)},
    "what has no weights": {"dropout": nn.Dropout(), "rotary": nn.Identity()},
    "a number": {"scale": nn.Parameter(torch.ones(1))},
}


@pytest.mark.parametrize("name", WHOLE)
def test_attention_with_more_of_all_heads_stays_whole(name):
    block = _with(**WHOLE[name])
    assert plan_for(block, 2).keys() == MLP
    assert units_for(block, 2).keys() == ATTENTION | MLP  # for a plan of the model's own, which cuts the rest


class _WidthOfX(Attention):
    """As in TrOCR, LED and FSMT."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, embed_dim = x.size()
        return self.o_proj(super().forward(x).reshape(batch, length, embed_dim))


class _Sizes(NamedTuple):
    hidden_dim: int


class _WidthInSizes(Attention):
    """As in Pegasus-X."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = _Sizes(hidden_dim=x.shape[-1])
        return self.o_proj(super().forward(x).view(*x.shape[:-1], sizes.hidden_dim))


@pytest.mark.parametrize("kind", [_WidthOfX, _WidthInSizes])
def test_attention_as_wide_as_its_input_stays_whole(kind):
    block = Block()
    block.self_attn = kind(128, 8, 8, 16)
    assert plan_for(block, 2).keys() == MLP
    assert units_for(block, 2).keys() == ATTENTION | MLP


@pytest.mark.parametrize("name", CUT)
def test_attention_with_parts_of_a_head_is_cut(name):
    assert plan_for(_with(**CUT[name]), 2).keys() == ATTENTION | MLP


@pytest.mark.parametrize("name", ["norm", "sparsity"])
def test_mlp_that_needs_all_hidden_features_stays_whole(name):
    mlp = Mlp(64, 96)
    if name == "norm":
        mlp.ffn_sub_norm = nn.RMSNorm(96)
    else:
        mlp.activation_sparsity = 0.95
    assert not plan_for(mlp, 2)


def test_norm_beside_an_mlp_is_no_obstacle():
    layer = nn.Module()
    layer.self_attn, layer.final_norm = Attention(64, 4, 4, 16), nn.LayerNorm(64)
    layer.fc1, layer.fc2 = nn.Linear(64, 64), nn.Linear(64, 64)
    assert {"fc1", "fc2"} <= plan_for(layer, 2).keys()


def test_layers_that_share_their_weights_stay_whole():
    """As those of Zamba's blocks: `shard_` refused its own plan."""
    model = nn.ModuleList([Mlp(64, 96), Mlp(64, 96), Mlp(64, 96)])
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(model[1], name).weight = getattr(model[0], name).weight
    qcore.quantize_(model, "w8a16")
    assert {name.partition(".")[0] for name in plan_for(model, 2)} == {"2"}
