"""The cases of the accuracy table in docs/reference/parallel.md: error against one process; run this to print it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parallel_models import Attention, Mlp, quantized, relative, with_order

import qcore
from qcore.nn import QuantizedLinear
from qcore.parallel import Cut, RowParallelLinear, shard_

K = 256


def mlp(
    rank: int, world: int, scheme: str, dtype: torch.dtype = torch.float32, hidden: int = 512, unit: int = 1,
    bias: bool = False, **sums: Any,
) -> dict[str, float]:  # fmt: skip
    """Errors of an MLP: against one process, and of both against float64 without quantized activations."""
    model = quantized(Mlp(K, hidden, bias), scheme, dtype)
    x = torch.randn(5, K).to(dtype)
    want, inner, down = model(x), model.inner(x), model.down_proj
    exact = inner.double() @ down.weight.dequantize(torch.float64).t() + (down.bias.double() if bias else 0)
    cuts = {"gate_proj": Cut("column", unit), "up_proj": Cut("column", unit), "down_proj": Cut("row", unit)}
    shard_(model, cuts, **sums)
    got = model(x)
    return {"tp": relative(got, want), "one": relative(want, exact), "exact": relative(got, exact)}


def attention(rank: int, world: int) -> dict[str, float]:
    """Grouped-query attention, q, k and v fused after the cut."""
    model = quantized(Attention(K, 8, 4, 32), "w4a16-g32")
    x = torch.randn(2, 7, K)
    want = model(x)
    shard_(model)
    assert qcore.fuse_(model)
    return {"tp": relative(model(x), want)}


def folded(rank: int, world: int) -> dict[str, float]:
    """The order of down_proj moves into gate_proj and up_proj."""
    model = quantized(Mlp(K, 512), "w4a16-g32")
    with_order(model.down_proj, torch.randperm(512))
    x = torch.randn(5, K)
    want = model(x)
    shard_(model)
    assert model.down_proj.weight.order is None
    return {"tp": relative(model(x), want)}


def padded(rank: int, world: int) -> dict[str, float]:
    """The order of o_proj cannot move across heads: each rank sorts its own columns by group."""
    model = quantized(Attention(K, 8, 4, 32), "w4a16-g32")
    with_order(model.o_proj, torch.randperm(K))
    x = torch.randn(2, 7, K)
    want = model(x)
    shard_(model)
    wider = torch.tensor(model.o_proj.in_features / model.o_proj.share.length)
    dist.all_reduce(wider, dist.ReduceOp.MAX)
    return {"tp": relative(model(x), want), "wider": wider.item()}


def codes(rank: int, world: int, scales: str) -> dict[str, float]:
    """An int8 result: the share of codes that differ, and by how much."""
    scheme = qcore.Scheme.parse("w8a8-o8(0.8,3)")
    weight = qcore.quantize(torch.randn(64, K), scheme.weight)
    layer = QuantizedLinear.from_qtensor(weight, torch.randn(64), scheme)
    x = torch.randn(9, K)
    want = layer(x)
    cut = RowParallelLinear.from_linear(layer, scales=scales)
    got = cut(x[:, cut.share.start : cut.share.stop].contiguous())
    apart = (got.int() - want.int()).abs()
    return {"codes": apart.max().item(), "share": (apart > 0).float().mean().item()}


ROWS: dict[str, Callable[..., dict[str, float]]] = {
    "w4a16-g32, float32": partial(mlp, scheme="w4a16-g32"),
    "w4a16-g32, bfloat16, sums in bfloat16": partial(mlp, scheme="w4a16-g32", dtype=torch.bfloat16),
    "w4a16-g32, bfloat16, sums in float32": partial(
        mlp, scheme="w4a16-g32", dtype=torch.bfloat16, sum_dtype=torch.float32
    ),
    "w4a16-g128-asym, K = 704: finer groups": partial(mlp, scheme="w4a16-g128-asym", hidden=704),
    "w4a16-g128, K = 688: finer groups": partial(mlp, scheme="w4a16-g128", hidden=688),
    "w4a16-g128, K = 688: whole groups, uneven": partial(mlp, scheme="w4a16-g128", hidden=688, unit=128),
    "w8a16 per channel, bias": partial(mlp, scheme="w8a16", bias=True),
    "grouped-query attention, w4a16-g32": attention,
    "w4a8-g32, local scales": partial(mlp, scheme="w4a8-g32"),
    "w4a8-g32, global scales": partial(mlp, scheme="w4a8-g32", scales="global"),
    "w8a8, bias, local scales": partial(mlp, scheme="w8a8", bias=True),
    "w8a8, bias, global scales": partial(mlp, scheme="w8a8", bias=True, scales="global"),
    "act-order, folded into the layers before": folded,
    "act-order, sorted and padded on each rank": padded,
}
"""Rows of the table: name to a case that returns ``tp``, the error against one process, and maybe others."""

CODES = {f"int8 results, {scales} scales": partial(codes, scales=scales) for scales in ("local", "global")}

LIMITS = {
    "bfloat16, sums in bfloat16": 6e-3,
    "bfloat16, sums in float32": 2e-4,  # now and then a sum is rounded to the other neighbour
    "local scales": 3e-2,
    "": 5e-7,
}
"""Largest error of the rows whose name ends in this; the first that fits counts."""


def limit(row: str) -> float:
    """The largest error that a row may have."""
    return next(value for ending, value in LIMITS.items() if row.endswith(ending))


CASES = {**ROWS, **CODES}


HEAD = ("| case | 2 ranks | 4 ranks |", "|---|---|---|")


def table(results: dict[int, dict[str, dict[str, float]]]) -> list[str]:
    """The lines of the table; ``results``: by number of ranks and row."""
    return [HEAD[0], *(" | ".join([f"| {name}", *(_cell(results[n][name]) for n in (2, 4))]) + " |" for name in CASES)]


def _cell(found: dict[str, float]) -> str:
    if "codes" in found:
        return f"{found['codes']} code apart in {found['share']:.0%}" if found["codes"] else "0"
    text = f"{found['tp']:.1e}" if found["tp"] else "0"
    if "one" in found and found["tp"] > 1e-3:
        text += f" (exact: {found['exact']:.1e}, one process {found['one']:.1e})"
    return text + (f" (K x {found['wider']:.2f})" if "wider" in found else "")


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    import gloo

    measured = {n: gloo.run("parallel_table", n, Path(tempfile.mkdtemp())) for n in (2, 4)}
    lines = table({n: {name: found[name][0] for name in CASES} for n, found in measured.items()})
    print("\n".join([lines[0], HEAD[1], *lines[1:]]))
