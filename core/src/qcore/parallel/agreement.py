"""Whether the ranks run the same kernels: each resolves alone, on its own part and with its own plugins."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..nn.base import QuantizedModule
from .ranks import Ranks


def disagreements(model: nn.Module, group: Any = None, *, ranks: Ranks | None = None) -> dict[str, list[str]]:
    """The layers whose ranks run different kernels, or versions of a plugin: name to the kernel of each rank.

    Call it on every rank of ``group``: one all_gather of a hash, and of the decisions themselves only if it differs.
    Kernels may differ between ranks where the parts have different sizes; results then differ by rounding.
    """
    ranks = ranks or Ranks(group)
    own = {name: _kernel(module) for name, module in model.named_modules() if isinstance(module, QuantizedModule)}
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).digest()
    # Seven bytes, so that the sign of an int64 does not matter.
    mine = torch.tensor([int.from_bytes(digest[:7], "big")], dtype=torch.int64, device=_device(ranks))
    ends = torch.cat([mine, -mine])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=ranks.group)
    if int(ends[0]) == -int(ends[1]):
        return {}
    every: list[Any] = [None] * ranks.size
    dist.all_gather_object(every, own, group=ranks.group)
    names = dict.fromkeys(name for found in every for name in found)
    rows = {name: [str(found.get(name, "none")) for found in every] for name in names}
    return {name: kernels for name, kernels in rows.items() if len(set(kernels)) > 1}


def _kernel(module: QuantizedModule) -> str:
    chosen = None if module.decision is None else module.decision.selected
    return "not bound" if chosen is None else f"{chosen.kernel} ({chosen.dist} {chosen.version})"


def _device(ranks: Ranks) -> torch.device:
    """A device on which the backend of the group can communicate."""
    backend = dist.get_backend(ranks.group)
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
