"""Mutated checkpoints: refused, with the model untouched, or loaded with the values that the file holds.

The first draws of each kind run in `nox -s tests`, the others in `nox -s grids`; QCORE_FUZZ=130000 draws more.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import checkpoint_mutations as mutations
import pytest
import safetensors
import safetensors.torch
import torch
from grids import draws
from torch import Tensor, nn

import qcore
from qcore import CheckpointError
from qcore.checkpoint import inspect, load_, save
from qcore.checkpoint.values import as_bytes, storable
from qcore.nn.base import QuantizedModule

SECONDS, CHARACTERS = 10.0, 2000
PARTS = 4


class Small(nn.Module):
    """Padded int4 codes with zero points, calibrated numbers, a convolution, a tied norm, a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 4)
        self.norm, self.same = nn.LayerNorm(4), nn.LayerNorm(4)
        self.same.weight = self.norm.weight
        self.conv = nn.Conv2d(2, 3, 1, bias=False)
        self.down = nn.Linear(4, 3)
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.same(self.norm(self.up(x))))


def quantized(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Small()
    with torch.no_grad():
        nn.init.normal_(model.norm.weight)
    scheme = {"up": "w4a16-g8-asym", "down": "w8a8-static", "conv": "w8a16"}
    qcore.quantize_(model, scheme, calibration=[torch.randn(5, 13)])
    return model


def raw(tensor: Tensor) -> tuple[torch.Size, bytes]:
    plain = storable(tensor)
    return tensor.shape, bytes(as_bytes(plain))


def held(model: nn.Module) -> dict[str, object]:
    """All that a load could change, by name: plain values bit for bit, layers and their weights by identity."""
    found: dict[str, object] = {}
    for name, module in model.named_modules():
        layer = isinstance(module, QuantizedModule)
        found[name] = id(module), module.training, id(module._store) if layer else 0
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found[f"{name}.{key}"] = id(tensor), tensor._version if key.startswith("packed_") else raw(tensor)
    return found


def in_file(path: Path) -> dict[str, Tensor]:
    """What another reader finds in a checkpoint, tied names included."""
    index = path / "model.safetensors.index.json"
    if not path.is_dir():
        shards = [path]
    elif index.is_file():
        shards = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        shards = list(path.glob("*.safetensors"))
    found, aliases = {}, {}
    for shard in shards:
        with safetensors.safe_open(shard, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            aliases.update(json.loads((file.metadata() or {}).get("qcore.aliases", "{}")))
    return {**found, **{name: found[target] for name, target in aliases.items() if target in found}}


def is_as_in_file(model: nn.Module, path: Path) -> bool:
    """Whether the model holds what another reader finds; what the model ties needs one name there."""
    found = in_file(path)
    for name, other in (("norm.weight", "same.weight"), ("same.weight", "norm.weight")):
        found.setdefault(name, found.get(other))
    return all(raw(found[name].to(value.dtype)) == raw(value) for name, value in model.state_dict().items())


def check(model: nn.Module, path: Path, *, thorough: bool) -> str:
    """Load; ``refused`` or ``loaded``. Fails where neither is done properly."""
    before, drawn = held(model), torch.get_rng_state()
    state = {name: raw(tensor) for name, tensor in model.state_dict().items()} if thorough else {}
    start = time.process_time()
    refusal = refusal_of(lambda: load_(model, path))
    assert time.process_time() - start < SECONDS
    assert held(model) == before if refusal else is_as_in_file(model, path)
    assert torch.equal(torch.get_rng_state(), drawn)
    shown = refusal_of(lambda: inspect(path)) if thorough else ""
    assert refusal or not shown
    assert max(len(refusal), len(shown)) < CHARACTERS
    if thorough and refusal:
        assert state == {name: raw(tensor) for name, tensor in model.state_dict().items()}
    return "refused" if refusal else "loaded"


def refusal_of(call: Callable[[], object]) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def checked(model: nn.Module, path: Path, seed: str) -> str:
    """`check`, and where it fails the seed that did it."""
    try:
        return check(model, path, thorough=zlib.crc32(seed.encode()) % 8 == 0)
    except BaseException as error:
        raise AssertionError(f"seed {seed!r}: {type(error).__name__}: {str(error)[:1000]}") from error


@pytest.mark.parametrize("numbers", draws(12_000, few=400, parts=PARTS))
def test_mutated_files(tmp_path, numbers):
    save(quantized(0), tmp_path / "good.safetensors")
    good, path, model = (tmp_path / "good.safetensors").read_bytes(), tmp_path / "m.safetensors", quantized(1)
    outcomes = Counter()
    for number in numbers:
        seed = f"file {number}"
        path.unlink(missing_ok=True)
        path.write_bytes(mutations.mutate_file(good, random.Random(seed)))
        outcomes[checked(model, path, seed)] += 1
    assert outcomes["refused"] > outcomes["loaded"] > 0, outcomes


@pytest.mark.parametrize("numbers", draws(8_000, few=250, parts=PARTS))
def test_mutated_directories(tmp_path, numbers):
    good, stranger = (whole(quantized(seed), tmp_path / str(seed)) for seed in (0, 2))
    path, model = tmp_path / "d", quantized(1)
    path.mkdir()
    outcomes, there = Counter(), {}
    for number in numbers:
        seed = f"directory {number}"
        there = put(path, there, mutations.mutate_directory(good, stranger, random.Random(seed)))
        outcomes[checked(model, path, seed)] += 1
    assert outcomes["refused"] > outcomes["loaded"] > 0, outcomes


def put(path: Path, there: dict[str, bytes], files: dict[str, bytes]) -> dict[str, bytes]:
    """Make ``path`` hold ``files``, where ``there`` is what it holds; only what differs is written."""
    for name, content in there.items():
        if content != files.get(name):  # file systems wait for the disk where a file is emptied, not where it goes
            (path / name).unlink()
    for name, content in files.items():
        if there.get(name) != content:
            (path / name).write_bytes(content)
    return files


def whole(model: nn.Module, path: Path) -> dict[str, bytes]:
    save(model, path, max_shard_size=80)
    return {file.name: file.read_bytes() for file in path.iterdir()}
