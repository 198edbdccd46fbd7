"""What the layers of qcore.parallel do on each rank; tests/core/parallel runs these on 2 and 4 gloo ranks."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parallel_models import Attention, Block, Mlp, experts, quantized, relative, with_order
from parallel_table import CODES, ROWS
from torch import nn

import qcore
from qcore.nn import QuantizedEmbedding, QuantizedLinear
from qcore.nn.siblings import SiblingLinear
from qcore.parallel import (
    ColumnParallelLinear,
    Cut,
    ParallelExperts,
    RowParallelLinear,
    VocabParallelEmbedding,
    disagreements,
    fold_order_,
    plan_for,
    shard_,
)

PAIR = {"up": "column", "down": "row"}
SCHEMES = (
    "w4a16", "w8a16-g32-asym", "w4a16-g32-fzp", "w4a8-g32-asym-aasym", "w8a8-static(0.05,3)", "wfp8a16",
    "wfp8a16-g32-e8m0", "wfp8afp8-static(0.02)", "wfp4a16-g32-e8m0", "wfp4a16-g16-e4m3", "wfp4a16-g16-e4m3d",
    "wnf4a16-g64", "w4a16-g32/plain_int32",
)  # fmt: skip


def pair(scheme: str, k: int = 96, hidden: int = 192, bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """Two linear layers with a ReLU between them; their input is positive and negative."""
    model = nn.Sequential()
    model.add_module("up", nn.Linear(k, hidden, bias))
    model.add_module("relu", nn.ReLU())
    model.add_module("down", nn.Linear(hidden, k, bias))
    return quantized(model, scheme, dtype)


def refused(call: Callable[[], Any], error: type[Exception] = qcore.UnsupportedError) -> str:
    """The message of the error that a call raises."""
    try:
        call()
    except error as raised:
        return str(raised)
    return "nothing was raised"


def scheme_error(rank: int, world: int, scheme: str) -> float:
    model, x = pair(scheme), torch.randn(7, 96)
    want = model(x)
    shard_(model, PAIR)
    assert isinstance(model.up, ColumnParallelLinear)
    assert isinstance(model.down, RowParallelLinear)
    return relative(model(x), want)


def local_scales(rank: int, world: int, scheme: str) -> float:
    """Against the sum of each cut's own product, computed in one process."""
    made = qcore.Scheme.parse(scheme)
    weight = qcore.quantize(torch.randn(64, 192), made.weight)
    layer = QuantizedLinear.from_qtensor(weight, torch.randn(64), made)
    x = torch.randn(5, 192)
    n = 192 // world
    want = torch.zeros(5, 64)
    for start in range(0, 192, n):
        part = weight.regroup(math.gcd(made.weight.group_size, n)) if made.weight.group_size else weight
        activation = made.activation
        if isinstance(activation, qcore.DynamicFP8) and activation.group:
            activation = qcore.DynamicFP8(part.format.group_size)
        want += qcore.linear(x[:, start : start + n], part.narrow(1, start, n), activation=activation)
    want += layer.bias
    cut = RowParallelLinear.from_linear(layer)
    return relative(cut(x[:, rank * n : rank * n + n]), want)


def whole_block(rank: int, world: int, kv_heads: int, fused: bool) -> dict[str, Any]:
    """A block with biases; ``kv_heads`` may be fewer than ranks."""
    model = quantized(Block(kv_heads=kv_heads), "w4a16-g32-asym")
    x = torch.randn(2, 5, 128)
    want = model(x)
    if fused:
        assert len(qcore.fuse_(model)) == 2
    chosen = shard_(model)
    own = model.self_attn
    siblings = sum(isinstance(m, SiblingLinear) and len(m.siblings) > 1 for m in model.modules())
    report = qcore.report(model)
    return {
        "error": relative(model(x), want), "heads": (own.num_heads, own.num_kv_heads), "siblings": siblings,
        "cuts": {name: cut.kind for name, cut in chosen.items()}, "kernels": sum(report.kernels().values()),
        "bytes": report.bytes_after,
    }  # fmt: skip


def uneven_heads(rank: int, world: int) -> dict[str, Any]:
    """Nine heads, three of them keys, over two ranks: a key and its queries stay together."""
    model = quantized(Attention(72, 9, 3, 8), "w8a16")
    x = torch.randn(2, 5, 72)
    want = model(x)
    shard_(model, {"[qkv]_proj": "column", "o_proj": "row"})
    return {"error": relative(model(x), want), "heads": model.num_heads}


def uncuttable_heads(rank: int, world: int) -> list[str]:
    """Three heads cannot be shared by two ranks: attention stays whole, the MLP is cut."""
    model = quantized(Block(d=96, heads=3, kv_heads=1, hidden=128), "w8a16")
    x = torch.randn(1, 4, 96)
    want = model(x)
    chosen = shard_(model)
    assert relative(model(x), want) < 5e-7
    return sorted(chosen)


def moe(rank: int, world: int, by: str, bias: bool, interleaved: bool, e: int = 4) -> float:
    layer = experts(e=e, bias=bias, interleaved=interleaved)
    x, index = torch.randn(6, 64), torch.randint(0, e, (6, 2))
    weights = torch.rand(6, 2)
    want = layer(x, index, weights)
    holder = nn.Module()
    holder.experts = layer
    shard_(holder, {"experts": Cut(by, 16)})
    assert isinstance(holder.experts, ParallelExperts)
    return relative(holder.experts(x, index, weights), want)


def moe_by_projections(rank: int, world: int) -> dict[str, str]:
    """A plan that names the two projections cuts the experts by tensor."""
    holder = nn.Module()
    holder.experts = experts()
    half = refused(lambda: shard_(holder, {"gate_up_proj": "column"}))
    kinds = {n: c.kind for n, c in shard_(holder, {"gate_up_proj": "column", "*.down_proj": "row"}).items()}
    return {"kinds": kinds, "half": half}


def moe_plan(rank: int, world: int) -> str:
    """Fewer experts than ranks are cut by tensor."""
    holder = nn.Module()
    holder.experts = experts(e=3)
    return plan_for(holder, world)["experts"].kind


def embedding(rank: int, world: int) -> dict[str, Any]:
    table = QuantizedEmbedding.from_float(nn.Embedding(50, 64, padding_idx=0), "w8a16")
    indices = torch.randint(0, 50, (3, 4))
    want = table(indices)
    holder = nn.Module()
    holder.table = table
    shard_(holder, {"table": "vocab"})
    assert isinstance(holder.table, VocabParallelEmbedding)
    outside = refused(lambda: holder.table(torch.tensor([50])), IndexError)
    return {"same": torch.equal(holder.table(indices), want), "outside": outside}


def gathered(rank: int, world: int) -> bool:
    """Every rank has all logits; 50 rows are no multiple of four."""
    head = quantized(nn.Sequential(nn.Linear(64, 50)), "w4a16-g32")
    x = torch.randn(2, 3, 64)
    want = head(x)
    shard_(head, {"0": "gather"})
    return bool(torch.allclose(head(x), want, atol=1e-6) and torch.allclose(head(x[0, 0]), want[0, 0], atol=1e-6))


def floats(rank: int, world: int) -> float:
    """Layers that were left float are cut in the same way."""
    model = nn.ModuleDict({"a": Mlp(64, 128, bias=True), "head": nn.Linear(64, 20)}).requires_grad_(False)
    x = torch.randn(3, 64)
    want = model["head"](model["a"](x))
    shard_(model, {"gate_proj": "column", "up_proj": "column", "down_proj": "row", "head": "gather"})
    return relative(model["head"](model["a"](x)), want)


def gradients(rank: int, world: int) -> dict[str, float]:
    """The gradient of x, and of biases, as in one process."""
    model = quantized(Block(), "w4a16-g32")
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer.bias.requires_grad_(True)
    x = torch.randn(2, 4, 128, requires_grad=True)
    model(x).square().sum().backward()
    want, bias = x.grad, model.mlp.down_proj.bias.grad
    part = model.mlp.up_proj.bias.grad
    for parameter in (x, *model.parameters()):
        parameter.grad = None
    shard_(model)
    up = model.mlp.up_proj
    model(x).square().sum().backward()
    own = part[up.share.start : up.share.stop]
    return {
        "x": relative(x.grad, want), "bias": relative(model.mlp.down_proj.bias.grad, bias),
        "part": relative(up.bias.grad, own),
    }  # fmt: skip


def global_gradients(rank: int, world: int) -> float:
    """Global scales of activations: the straight-through gradient of one process."""
    model = pair("w8a8")
    x = torch.randn(4, 96, requires_grad=True)
    model(x).square().sum().backward()
    want, x.grad = x.grad, None
    shard_(model, PAIR, scales="global")
    model(x).square().sum().backward()
    return relative(x.grad, want)


def compiled(rank: int, world: int, scheme: str, **sums: Any) -> dict[str, float]:
    """One graph for any number of rows."""
    model = pair(scheme)
    x = torch.randn(3, 96)
    want, more = model(x), model(torch.cat([x, x]))
    shard_(model, PAIR, **sums)
    fast = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        return {"three": relative(fast(x), want), "six": relative(fast(torch.cat([x, x])), more)}


def traced_gradient(rank: int, world: int) -> float:
    model = pair("w4a16-g32")
    x = torch.randn(3, 96, requires_grad=True)
    model(x).square().sum().backward()
    want, x.grad = x.grad, None
    shard_(model, PAIR)
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    return relative(x.grad, want)


def states(rank: int, world: int) -> dict[str, Any]:
    """A state dict is this rank's part, and goes back into a layer with another weight."""
    first, second = pair("w4a16-g32"), pair("w4a16-g32")
    x = torch.randn(3, 96)
    want = first(x)
    for model in (first, second):
        shard_(model, PAIR)
    state = first.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    second.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    twin = copy.deepcopy(second)
    return {"shapes": shapes, "error": relative(second(x), want), "copy": torch.equal(twin(x), second(x))}


def padded_state(rank: int, world: int) -> bool:
    """The columns of a weight with an order are part of the state."""
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = quantized(Attention(64, 4, 4, 16), "w4a16-g32")
        with_order(model.o_proj, torch.randperm(64, generator=torch.Generator().manual_seed(3)))
        models.append(model)
    x = torch.randn(1, 3, 64)
    want = models[0](x)
    for model in models:
        shard_(model)
    models[1].load_state_dict({name: t.clone() for name, t in models[0].state_dict().items()})
    return relative(models[1](x), want) < 5e-7


def folding(rank: int, world: int) -> dict[str, Any]:
    model = quantized(Mlp(64, 96, bias=True), "w4a16-g32")
    with_order(model.down_proj, torch.randperm(96))
    x = torch.randn(3, 64)
    want = model(x)
    fold_order_([model.gate_proj, model.up_proj], model.down_proj)
    with_order(model.down_proj, torch.randperm(96))
    other = refused(lambda: fold_order_([nn.Linear(64, 95)], model.down_proj))
    with_order(model.down_proj, torch.arange(96))
    return {"error": relative(model(x), want), "other": other}


def outputs(rank: int, world: int) -> dict[str, Any]:
    """Dtypes of results: of x, of the layer under autocast, fixed; x without rows; x of more dimensions."""
    model = pair("w4a16-g32", dtype=torch.bfloat16)
    model.down.out_dtype = torch.float32
    shard_(model, PAIR)
    x = torch.randn(2, 3, 96, dtype=torch.bfloat16)
    fixed, empty = model(x), model(x[:0])
    other = pair("w4a16-g32")
    shard_(other, PAIR, sum_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        auto = other(x.float())
    wrong = refused(lambda: model.down(x[..., :5]), qcore.FormatError)
    return {
        "fixed": fixed.dtype, "empty": tuple(empty.shape), "auto": auto.dtype, "shape": tuple(fixed.shape),
        "wrong": wrong,
    }  # fmt: skip


def token_nan(rank: int, world: int) -> bool:
    """A token that holds NaN on one rank gives NaN on all, under global scales."""
    model = pair("w8a8")
    shard_(model, PAIR, scales="global")
    x = torch.randn(3, model.down.in_features)
    if rank == world - 1:
        x[1, 0] = float("nan")
    y = model.down(x)
    return bool(y[1].isnan().all() and not y[0].isnan().any() and not y[2].isnan().any())


def own_reduction(rank: int, world: int) -> dict[str, Any]:
    calls = []

    def doubled(y: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(y.shape))
        dist.all_reduce(y)
        return y

    model, x = pair("w4a16-g32"), torch.randn(3, 96)
    want = model(x)
    shard_(model, PAIR, all_reduce=doubled)
    return {"error": relative(model(x), want), "calls": calls}


def overlapping(rank: int, world: int) -> dict[str, Any]:
    """Many rows in halves, as on a GPU: the first half's sum travels while the second is multiplied."""
    model, x = pair("w8a8"), torch.randn(3, 771, 96)  # 2313 rows: halves of 1280 and 1033
    shard_(model, PAIR)
    layer, rows = model.down, []
    h = model.up(x).relu()
    with torch.no_grad():
        want = layer(h)
        layer.overlaps_on, plain = "cpu", layer._partial
        layer._partial = lambda part: (rows.append(len(part)), plain(part))[1]
        found = layer(h)
    layer(h)  # gradients are recorded: whole
    return {"error": relative(found, want), "rows": rows}


def disagreeing(rank: int, world: int) -> dict[str, Any]:
    """A rank whose settings differ chooses another kernel, which the others hear of."""
    model = pair("w8a16", k=64, hidden=64 * world)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard_(model, PAIR)
    alike = disagreements(model), len(caught)
    other = pair("w8a16", k=64, hidden=64 * world)
    if rank == 1:
        other = other.bfloat16()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard_(other, PAIR)
    return {"alike": alike, "names": sorted(disagreements(other)), "warned": [str(w.message) for w in caught]}


def refusals(rank: int, world: int) -> dict[str, str]:
    odd = pair("w4a16-g32", hidden=world * 17)
    before = {name: id(module) for name, module in odd.named_modules()}
    tied = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    tied["b"].weight = tied["a"].weight
    qcore.quantize_(tied, "w8a16")
    done = pair("w8a16")
    shard_(done, PAIR)
    conv = nn.Sequential(nn.Conv2d(4, 4, 1))
    ordered = experts()
    found = {
        "group": refused(lambda: shard_(odd, PAIR)),
        "few": refused(lambda: shard_(pair("w8a16", k=16), {"up": Cut("row", 16)})),
        "twice": refused(lambda: shard_(done, PAIR)),
        "again": refused(lambda: RowParallelLinear.from_linear(done.down)),
        "tied": refused(lambda: shard_(tied, {"a": "column"})),
        "conv": refused(lambda: shard_(conv, {"0": "column"})),
        "kind": refused(lambda: shard_(pair("w8a16"), {"up": "diagonal"})),
        "unit": refused(lambda: Cut("column", 0)),
        "experts": refused(lambda: ParallelExperts.from_experts(ordered, "row")),
        "nothing": refused(lambda: shard_(nn.Sequential(nn.Linear(8, 8)))),
        "plan": refused(lambda: shard_(done, "column")),
        "scales": refused(lambda: RowParallelLinear.from_linear(pair("w8a8").down, scales="both")),
        "fp8": refused(lambda: RowParallelLinear.from_linear(pair("wfp8afp8").down, scales="global")),
        "dtype": refused(lambda: RowParallelLinear.from_linear(pair("w8a8").down, sum_dtype=torch.int8)),
        "float": refused(lambda: ColumnParallelLinear.from_linear(nn.Linear(8, 8))),
        "parts": refused(lambda: shard_(pair("w8a16", hidden=33), {"up": Cut("column", parts=2)})),
    }
    assert before == {name: id(module) for name, module in odd.named_modules()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard_(pair("w8a16"), {**PAIR, "dwon": "row"})
    return {**found, "typo": str(caught[0].message)}


def making(rank: int, world: int) -> bool:
    """From a float layer and from a weight: the same part as from a layer."""
    torch.manual_seed(1)
    layer, x = nn.Linear(64, 96).requires_grad_(False), torch.randn(3, 64)
    whole = QuantizedLinear.from_float(layer, "w8a16")
    share = 96 // world
    want = whole(x)[:, rank * share : rank * share + share]
    weight = qcore.quantize(layer.weight, "int8/plain")
    made = [
        ColumnParallelLinear.from_float(layer, "w8a16"),
        ColumnParallelLinear.from_qtensor(weight, layer.bias, "w8a16", group=dist.group.WORLD),
        ColumnParallelLinear.from_linear(whole, unit=8),
    ]
    assert not made[0].bias.requires_grad
    return all(torch.allclose(part(x), want, atol=1e-6) for part in made)


def half_of_gate_up(rank: int, world: int) -> float:
    """One layer for gate and up: a part of each half."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Linear(64, 192), nn.Linear(96, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = self.gate_up_proj(x).chunk(2, -1)
            return self.down_proj(nn.functional.silu(gate) * up)

    model, x = quantized(Fused(), "w8a16"), torch.randn(3, 64)
    want = model(x)
    shard_(model)
    return relative(model(x), want)


def pickling(rank: int, world: int) -> str:
    model = pair("w8a16")
    shard_(model, PAIR)
    x = torch.randn(2, 96)
    again = pickle.load(io.BytesIO(pickle.dumps(model)))
    assert torch.equal(again(x), model(x))
    own = dist.new_group(list(range(world)))
    other = pair("w8a16")
    shard_(other, PAIR, own)
    return refused(lambda: pickle.dumps(other))


CASES: dict[str, Callable[..., Any]] = {
    **ROWS,
    **CODES,
    **{f"scheme {scheme}": partial(scheme_error, scheme=scheme) for scheme in SCHEMES},
    **{
        f"local {scheme}": partial(local_scales, scheme=scheme)
        for scheme in ("w8a8", "wfp8afp8", "wfp8afp8-g32", "w4a8-g32")
    },
    "block": partial(whole_block, kv_heads=4, fused=False),
    "block fused": partial(whole_block, kv_heads=4, fused=True),
    "block with few keys": partial(whole_block, kv_heads=2, fused=True),
    "block with one key": partial(whole_block, kv_heads=1, fused=False),
    "uneven heads": uneven_heads,
    "uncuttable heads": uncuttable_heads,
    "experts by expert": partial(moe, by="expert", bias=True, interleaved=False),
    "experts by expert, uneven": partial(moe, by="expert", bias=False, interleaved=False, e=5),
    "experts by tensor": partial(moe, by="tensor", bias=True, interleaved=False),
    "experts by tensor, interleaved": partial(moe, by="tensor", bias=True, interleaved=True),
    "experts by projections": moe_by_projections,
    "experts by plan": moe_plan,
    "embedding": embedding,
    "gather": gathered,
    "floats": floats,
    "gradients": gradients,
    "global gradients": global_gradients,
    "compiled": partial(compiled, scheme="w4a16-g32"),
    "compiled, global scales": partial(compiled, scheme="w8a8", scales="global"),
    "compiled gradient": traced_gradient,
    "states": states,
    "padded state": padded_state,
    "folding": folding,
    "outputs": outputs,
    "token nan": token_nan,
    "own reduction": own_reduction,
    "overlapping": overlapping,
    "disagreeing": disagreeing,
    "refusals": refusals,
    "making": making,
    "half of gate and up": half_of_gate_up,
    "pickling": pickling,
}
