"""What divides badly: three ranks, fewer groups than ranks, odd heads, orders under codes; tests/core/parallel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import parallel_cases
import torch
from parallel_cases import PAIR, pair, refused
from parallel_models import Attention, Block, Mlp, experts, quantized, relative, with_order
from torch import nn

import qcore
from qcore.nn import QuantizedLinear
from qcore.parallel import Cut, RowParallelLinear, plan_for, shard_


def planned(rank: int, world: int, hidden: int, scheme: str = "w4a16-g32", heads: int = 6, head_dim: int = 16) -> Any:
    """The default plan for a block: what it cuts, in which units, and the error."""
    model = quantized(Block(heads * head_dim, heads, heads, hidden), scheme)
    x = torch.randn(2, 3, heads * head_dim)
    want = model(x)
    chosen = shard_(model)
    return {"error": relative(model(x), want), "units": {name: cut.unit for name, cut in chosen.items()}}


def odd_experts(rank: int, world: int, scheme: str, by: str) -> float:
    """Five experts, or parts of their hidden features that are no multiple of a group."""
    layer = experts(scheme, e=5, bias=True, hidden=80)
    x, index, weights = torch.randn(6, 64), torch.randint(0, 5, (6, 2)), torch.rand(6, 2)
    want = layer(x, index, weights)
    holder = nn.Module()
    holder.experts = layer
    shard_(holder, {"experts": Cut(by, 16)})
    return relative(holder.experts(x, index, weights), want)


def few_experts(rank: int, world: int) -> dict[str, Any]:
    """Two experts for three ranks are cut by tensor, in units that their groups allow."""
    layer = experts(e=2, hidden=64)
    x, index, weights = torch.randn(6, 64), torch.randint(0, 2, (6, 1)), torch.rand(6, 1)
    want = layer(x, index, weights)
    holder = nn.Module()
    holder.experts = layer
    cut = plan_for(holder, world)["experts"]
    shard_(holder)
    return {"cut": (cut.kind, cut.unit), "error": relative(holder.experts(x, index, weights), want)}


def unchanged(rank: int, world: int) -> dict[str, tuple[str, bool]]:
    """Whatever is refused leaves the model as it was: the message, and whether every module is the same."""

    def tried(model: nn.Module, plan: Any, **sums: Any) -> tuple[str, bool]:
        before = {name: id(module) for name, module in model.named_modules()}
        message = refused(lambda: shard_(model, plan, **sums))
        return message, before == {name: id(module) for name, module in model.named_modules()}

    def mixture(**sizes: Any) -> nn.Module:
        return nn.ModuleDict({"mlp": quantized(Mlp(64, 96), "w8a16"), "experts": experts(**sizes)})

    cuts = {"gate_proj": "column", "up_proj": "column", "down_proj": "row", "experts": "tensor"}
    ordered = mixture()
    down = ordered["experts"].down_proj
    down.weight = down.weight.derived(order=torch.randperm(96, dtype=torch.int32).expand(4, 96).contiguous())
    grouped = pair("wfp8afp8-g32", hidden=32 * world + 16)
    return {
        "fine experts": tried(mixture(hidden=world * 17), cuts),
        "ordered experts": tried(ordered, cuts),
        "many experts": tried(mixture(e=world - 1), {**cuts, "experts": "expert"}),
        "global fp8": tried(pair("wfp8afp8"), PAIR, scales="global"),
        "global groups": tried(grouped, {"up": Cut("column", 16), "down": Cut("row", 16)}, scales="global"),
        "sums": tried(pair("w8a16"), PAIR, sum_dtype=torch.int8),
    }


def codes_and_order(rank: int, world: int) -> float:
    """Padding of sorted columns stands for zero, also among int8 codes whose zero point is another."""
    scheme = qcore.Scheme.parse("w4a8-g32-static(0.05,9)")
    layer = QuantizedLinear.from_qtensor(qcore.quantize(torch.randn(64, 192), scheme.weight), None, scheme)
    with_order(layer, torch.randperm(192))
    codes = torch.randint(-128, 128, (5, 192), dtype=torch.int8)
    want = layer(codes)
    cut = RowParallelLinear.from_linear(layer)
    assert cut.in_features > cut.share.length
    return relative(cut(codes[:, cut.share.start : cut.share.stop].contiguous()), want)


def tied(rank: int, world: int) -> dict[str, Any]:
    """A head that shares its table with the embedding stays whole with it; the block between them is cut."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Embedding(50, 96), Block(96, 6, 3, 96), nn.Linear(96, 50, False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.block(self.embed(ids)))

    model, ids = quantized(Model(), "w4a16-g32"), torch.randint(0, 50, (2, 4))
    want = model(ids)
    cuts = shard_(model)
    shared = qcore.report(model)["head"].tied_to
    return {"error": relative(model(ids), want), "whole": not {"embed", "head"} & cuts.keys(), "shared": shared}


def bias_of_heads(rank: int, world: int, scheme: str = "") -> float:
    """A table of biases per head, quantized or not, and a width that the module keeps, as in T5 and XGLM."""

    class Biased(Attention):
        def __init__(self) -> None:
            super().__init__(96, 6, 6, 16)
            self.embed_dim, self.bias = 96, nn.Embedding(9, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (p(x).unflatten(-1, (-1, 16)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            places = torch.arange(x.shape[1])
            mask = self.bias((places[None] - places[:, None]) % 9).permute(2, 0, 1)
            y = nn.functional.scaled_dot_product_attention(q, k, v, mask[None])
            return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:2], self.embed_dim))

    model, x = Biased(), torch.randn(2, 5, 96)
    if scheme:
        qcore.quantize_(model, {"bias": scheme})
        assert isinstance(model.bias, qcore.nn.QuantizedEmbedding)
    model = quantized(model, "w8a16")
    want = model(x)
    assert len(shard_(model)) == 4
    assert model.bias.weight.shape == (9, 6 // world)
    return relative(model(x), want)


def meshes(rank: int, world: int) -> str:
    """A mesh of two dimensions is refused by name."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    model, x = pair("w8a16"), torch.randn(3, 96)
    want = model(x)
    message = refused(lambda: shard_(model, PAIR, mesh))
    shard_(model, PAIR, mesh["tp"])
    assert relative(model(x), want) < 5e-7
    return message


SCHEMES = ("w8a16", "nf4", "mxfp4", "wfp8a16", "w4a16-g32-asym@minmax", "wfp4a16-g16-e4m3@absmax")
AGAIN = (
    "block", "block fused", "block with one key", "uneven heads", "gather", "embedding", "floats", "gradients",
    "global gradients", "compiled", "folding", "padded state", "token nan", "disagreeing", "half of gate and up",
    "scheme w4a16-g32-fzp", "scheme wfp8a16-g32-e8m0", "scheme wnf4a16-g64", "scheme wfp4a16-g16-e4m3d", "local w8a8",
    "int8 results, global scales", "act-order, sorted and padded on each rank",
)  # fmt: skip
"""Cases of 2 and 4 ranks that three ranks share unevenly, or that read a neighbour's rank."""

CASES: dict[str, Callable[..., Any]] = {
    **{f"groups, {hidden} features": partial(planned, hidden=hidden) for hidden in (40, 44, 64, 100)},
    "odd heads": partial(planned, hidden=96, head_dim=25),
    "heads that cut groups": partial(planned, hidden=96, head_dim=12, scheme="w4a16-g128"),
    **{f"experts, {scheme} by {by}": partial(odd_experts, scheme=scheme, by=by)
       for scheme in SCHEMES for by in ("expert", "tensor")},
    "few experts": few_experts,
    "unchanged": unchanged,
    "codes and order": codes_and_order,
    "bias of heads": bias_of_heads,
    "meshes": meshes,
    "bias of heads, quantized": partial(bias_of_heads, scheme="w8a16"),
    "tied": tied,
    **{name: parallel_cases.CASES[name] for name in AGAIN},
}  # fmt: skip
