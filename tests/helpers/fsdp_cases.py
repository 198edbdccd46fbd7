"""FSDP2 and torch.distributed.checkpoint over `NeutralLinear`, on each rank; see tests/core/parallel/test_fsdp.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel_models import Block, quantized, relative
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import qcore
from qcore.formats.bits import raw
from qcore.nn import NeutralLinear
from qcore.parallel import unpack_

D, HIDDEN = 128, 260
"""260 rows over 4 ranks are even, 130 bytes of K are not; a scale of one group has fewer rows than ranks."""


class Lora(nn.Module):
    """A frozen layer with a trained product of rank 4 beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, 4) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def adapted(scheme: str = "w4a16-g32", seed: int = 0) -> nn.Module:
    """A block of neutral layers, each with an adapter."""
    torch.manual_seed(seed)
    model = quantized(Block(D, hidden=HIDDEN), scheme)
    unpack_(model)
    torch.manual_seed(seed + 1)
    for part in (model.self_attn, model.mlp):
        for name, layer in list(part.named_children()):
            setattr(part, name, Lora(layer))
    return model.train()


def mixed(seed: int) -> nn.Module:
    """As `adapted`, with weights of two kinds: one with zero points, one with a global scale."""
    model = adapted("w4a16-g32-asym", seed)
    model.mlp = adapted("wfp4a16-g16-e4m3@absmax", seed).mlp
    return model


def sharded(model: nn.Module, **policy: Any) -> nn.Module:
    """Sharded by FSDP2: attention, MLP and the rest are one group each."""
    for part in (model.self_attn, model.mlp, model):
        fully_shard(part, **policy)
    return model


def trained(model: nn.Module, steps: int = 3) -> list[float]:
    """The losses of a few steps."""
    torch.manual_seed(5)
    x, target = torch.randn(4, 6, D), torch.randn(4, 6, D)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def held(model: nn.Module) -> int:
    """Bytes of quantized weights that this rank holds."""
    parts = [p for m in model.modules() if isinstance(m, NeutralLinear) for p in m.weight.parameters()]
    local = [p.to_local() if hasattr(p, "to_local") else p for p in parts]
    return sum(t.numel() * t.element_size() for t in local)


def qlora(rank: int, world: int) -> dict[str, Any]:
    """Adapters train as in one process, and each rank holds its part of the frozen weights."""
    one, many = adapted(), adapted()
    whole = held(many)
    sharded(many)
    losses = trained(one), trained(many)
    a = one.mlp.up_proj.a, many.mlp.up_proj.a.full_tensor()
    rows = [row for row in qcore.report(many) if row.kind == "NeutralLinear"]
    return {
        "losses": losses, "adapter": relative(a[1], a[0]), "held": held(many), "whole": whole,
        "reported": sum(row.bytes_after for row in rows), "layers": len(rows),
    }  # fmt: skip


def every_scheme(rank: int, world: int) -> dict[str, float]:
    found = {}
    for scheme in ("w8a8", "wfp8a16", "wfp4a16-g16-e4m3", "wnf4a16-g64", "mxfp4", "w4a16-g32-asym"):
        model = adapted(scheme).eval()
        x = torch.randn(2, 3, D)
        want = model(x)
        found[scheme] = relative(sharded(model)(x), want)
    return found


def mixed_precision(rank: int, world: int) -> dict[str, Any]:
    """Scales of the dtype of the computation pass; others would be rounded, so they are refused."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = adapted()
    sharded(model, mp_policy=half)
    try:
        model(torch.randn(1, 2, D))
        message = "nothing was raised"
    except qcore.FormatError as error:
        message = str(error)
    same = {}
    for scheme in ("w4a16-g32@absmax", "nvfp4", "mxfp4", "wfp8a16-g32-e8m0"):
        torch.manual_seed(0)
        fits = nn.Sequential(nn.Linear(64, 32).bfloat16())
        qcore.quantize_(fits, scheme)
        unpack_(fits)
        x = torch.randn(2, 64).bfloat16()
        want = fits(x)
        fully_shard(fits, mp_policy=half)
        same[scheme] = torch.equal(fits(x), want)
    return {"message": message, "same": same}


def outside(rank: int, world: int) -> str:
    """A layer that is called past the module that gathers its weight."""
    model = sharded(adapted())
    try:
        model.mlp.up_proj.base(torch.randn(1, D))
    except qcore.FormatError as error:
        return str(error)
    return "nothing was raised"


def folder(name: str) -> Path:
    """A folder that all processes of the test know."""
    return Path(os.environ["QCORE_CACHE_DIR"]).parents[1] / name


def saving(rank: int, world: int) -> bool:
    """Writes a sharded model, for other numbers of ranks to read."""
    dcp.save(get_model_state_dict(sharded(mixed(seed=7))), checkpoint_id=folder(f"by{world}"))
    return True


def gathered(tensor: Any, world: int) -> torch.Tensor:
    """The whole of a tensor that is sharded along its first dimension. gloo does not gather fp8 by itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    local = raw(tensor.to_local().detach())
    every: list[Any] = [None] * world
    dist.all_gather_object(every, local.tolist())
    rows = [torch.tensor(part, dtype=local.dtype).reshape(-1, *tensor.shape[1:]) for part in every]
    return torch.cat(rows).view(tensor.dtype)


def loading(rank: int, world: int) -> dict[str, bool]:
    """Reads what other numbers of ranks have written: the same bits."""
    wanted = mixed(seed=7).state_dict()
    found = {}
    for path in sorted(folder("").glob("by*")):
        model = sharded(mixed(seed=9))
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state)
        now = {name: gathered(t, world) for name, t in model.state_dict().items()}
        found[path.name] = now.keys() == wanted.keys() and all(torch.equal(now[name], wanted[name]) for name in now)
    return found


def packed_in_place(rank: int, world: int) -> dict[str, float]:
    """A load in place into the state of packed layers, whose packed form is no neutral one."""
    found = {}
    for scheme in ("w8a16", "w4a16-g32", "w4a16-g32-asym"):
        first, second = (quantized(Block(D), scheme, torch.bfloat16) for _ in range(2))
        x = torch.randn(1, 3, D).bfloat16()
        second(x)
        dcp.save(first.state_dict(), checkpoint_id=folder(f"packed{world}-{scheme}"))
        state = second.state_dict()
        dcp.load(state, checkpoint_id=folder(f"packed{world}-{scheme}"))
        dist.barrier()
        found[scheme] = relative(second(x), first(x))
    return found


CASES: dict[str, Callable[..., Any]] = {
    "qlora": qlora,
    "every scheme": every_scheme,
    "mixed precision": mixed_precision,
    "outside": outside,
    "saving": saving,
    "packed in place": packed_in_place,
    "loading": loading,
}
