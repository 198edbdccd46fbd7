"""What leaves a cut model and is loaded again: state dicts, DCP, `qcore.save`; tests/core/parallel."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel_models import Block, Mlp, experts
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import qcore
from qcore.checkpoint import inspect
from qcore.parallel import named_by_rank, shard_


class Model(nn.Module):
    """Attention, an MLP, a float MLP, an embedding and experts, which are cut in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block, self.dense = nn.Embedding(32, 128), Block(), Mlp(128, 96)
        self.norm = nn.LayerNorm(128)
        self.experts: nn.Module = nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        y = self.dense(self.norm(self.block(self.tokens(ids))))
        index = torch.tensor([[0, 3]]).expand(ids.numel(), 2)
        mixed = self.experts(y.flatten(0, 1)[:, :64], index, torch.full(index.shape, 0.5))
        return torch.cat([y.flatten(0, 1), mixed], -1)


PLAN = {
    "tokens": "vocab", "*q_proj": "column", "*k_proj": "column", "*v_proj": "column", "*o_proj": "row",
    "*gate_proj": "column", "*up_proj": "column", "*down_proj": "row", "experts": "expert",
}  # fmt: skip
IDS = torch.arange(10).view(2, 5)
Message = str


def model(seed: int, scheme: str = "w4a16-g32") -> nn.Module:
    """A whole model with random weights and biases."""
    torch.manual_seed(seed)
    made = Model()
    qcore.quantize_(made, scheme, exclude="dense.*")
    made.experts = experts(scheme, e=4, bias=True)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return made.eval().requires_grad_(False)


def cut(seed: int, scheme: str = "w4a16-g32") -> tuple[nn.Module, Tensor]:
    """This rank's part, and what it returns."""
    made = model(seed, scheme)
    shard_(made, PLAN)
    return made, made(IDS)


def message(action: Callable[[], object]) -> Message:
    """The error of an action: one of torch.distributed.checkpoint is no `Exception`."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001
        return str(error)
    return "no error"


def shared_folder() -> str:
    """A folder that all ranks know."""
    import tempfile

    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    return names[0]


def refused(rank: int, world: int) -> dict[str, Message]:
    """Whatever a tool does to the state dict first, its checkpoint would hold one rank's part: an error."""
    made, _ = cut(1)
    folder = shared_folder()

    def save(state: dict[str, Any]) -> Callable[[], object]:
        return lambda: dcp.save(state, checkpoint_id=folder)

    options = {"cpu": {"cpu_offload": True}, "full": {"full_state_dict": True}}
    states = {name: get_model_state_dict(made, options=StateDictOptions(**given)) for name, given in options.items()}
    states |= {"state": get_model_state_dict(made), "copied": copy.deepcopy(made.state_dict())}
    floats = nn.Sequential(Mlp(64, 96))
    shard_(floats, {"*gate_proj": "column", "*up_proj": "column", "*down_proj": "row"})
    states |= {"floats": floats.state_dict(), "one": {"one": made.state_dict()["experts.gate_up_proj.weight.data"]}}
    found = {name: message(save(state)) for name, state in states.items()}
    found["async"] = message(lambda: dcp.async_save(made.state_dict(), checkpoint_id=folder).result())
    part = states["state"]["tokens.weight.data"]
    dcp.save({"old": torch.zeros(part.shape, dtype=part.dtype)}, checkpoint_id=folder)
    found["load"] = message(lambda: dcp.load({"old": part}, checkpoint_id=folder))
    return found


def by_rank(rank: int, world: int, scheme: str = "w4a16-g32") -> dict[str, Any]:
    """Under names of their rank all parts are written, read in place, and loaded by `load_state_dict`."""
    (made, want), (other, _) = cut(1, scheme), cut(2, scheme)
    folder = shared_folder()
    dcp.save(named_by_rank(get_model_state_dict(made)), checkpoint_id=folder)
    state = named_by_rank(get_model_state_dict(other))
    dcp.load(state, checkpoint_id=folder)
    third, _ = cut(3, scheme)
    set_model_state_dict(third, state)
    same = [torch.equal(a, b) for a, b in zip(third.state_dict().values(), made.state_dict().values(), strict=True)]
    lost = message(lambda: dcp.load({f"tokens.weight.data@0of{world + 1}": torch.zeros(1)}, checkpoint_id=folder))
    return {"third": torch.equal(third(IDS), want), "same": all(same), "lost": lost, "names": sorted(state)}


def per_rank(rank: int, world: int) -> dict[str, Any]:
    """A state dict per rank goes back to its rank, pickled as plain tensors, and to no other."""
    (made, want), (other, _) = cut(1), cut(2)
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    types = {type(value).__name__ for value in state.values()}
    other.load_state_dict(state)
    assigned, _ = cut(3)
    assigned.load_state_dict(made.state_dict(), assign=True)
    kinds = {type(value).__name__ for value in (*assigned.parameters(), *assigned.buffers())}
    every: list[Any] = [None] * world
    dist.all_gather_object(every, state)
    neighbour = every[(rank + 1) % world]
    whole = model(4)
    before = {name: value.clone() for name, value in cut(5)[0].state_dict().items()}
    old = {name: before[name] for name in before}  # an earlier qcore: no note of the rank
    other_old, _ = cut(6)
    other_old.load_state_dict(old)
    return {
        "types": types, "kinds": kinds, "equal": torch.equal(other(IDS), want),
        "assigned": torch.equal(assigned(IDS), want),
        "neighbour": message(lambda: made.load_state_dict(neighbour)),
        "whole": message(lambda: whole.load_state_dict(state)),
        "old": all(torch.equal(value, before[name]) for name, value in other_old.state_dict().items()),
    }  # fmt: skip


def saved(rank: int, world: int) -> dict[str, Any]:
    """A file per rank is loaded by the same rank of a cut model, whose layers stay cut, and by nobody else."""
    (made, want), (other, _) = cut(1), cut(2)
    folder = shared_folder()
    qcore.save(made, f"{folder}/{rank}.safetensors")
    qcore.save(made.state_dict(), f"{folder}/state{rank}")
    dist.barrier()
    kinds = [type(module) for module in other.modules()]
    qcore.load_(other, f"{folder}/{rank}.safetensors")
    alike = kinds == [type(module) for module in other.modules()]
    equal = torch.equal(other(IDS), want)
    qcore.save(other, f"{folder}/again{rank}.safetensors")
    one = f"{folder}/{(rank + 1) % world}.safetensors"
    return {
        "equal": equal,
        "kinds": alike,
        "again": message(lambda: qcore.load_(model(3), f"{folder}/again{rank}.safetensors")),
        "state": message(lambda: qcore.load_(model(3), f"{folder}/state{rank}")),
        "neighbour": message(lambda: qcore.load_(other, one)),
        "convert": message(lambda: qcore.convert(one, f"{folder}/converted{rank}", to="gptq")),
        "whole": message(lambda: qcore.load_(model(3), one)),
        "listed": message(lambda: inspect(one)),
    }


CASES: dict[str, Callable[..., Any]] = {
    "refused": refused,
    **{f"by rank, {scheme}": partial(by_rank, scheme=scheme) for scheme in ("w4a16-g32", "nvfp4", "w8a8")},
    "per rank": per_rank,
    "saved": saved,
}
