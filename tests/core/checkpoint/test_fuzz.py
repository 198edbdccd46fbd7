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
from qcore import CheckpointError, QTensor
from qcore.checkpoint import inspect, load_, save
from qcore.checkpoint.archive import Archive
from qcore.checkpoint.values import as_bytes, storable
from qcore.nn.base import QuantizedModule

SECONDS, CHARACTERS = 10.0, 2000
PARTS = 4


class Small(nn.Module):
    """Padded int4 codes with zero points, calibrated numbers, a convolution, a tied norm, a buffer of integers.

    Newer parts: an order, a global scale, e8m0 scales, codes that are NaN, a static fp8 activation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 4)
        self.norm, self.same = nn.LayerNorm(4), nn.LayerNorm(4)
        self.same.weight = self.norm.weight
        self.conv = nn.Conv2d(2, 3, 1, bias=False)
        self.down = nn.Linear(4, 3)
        self.ordered, self.twofold = nn.Linear(13, 2, bias=False), nn.Linear(13, 2, bias=False)
        self.powers, self.fp8 = nn.Linear(13, 2, bias=False), nn.Linear(13, 2, bias=False)
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        self.fp8(x)
        return self.down(self.same(self.norm(self.up(x))))


def quantized(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Small()
    with torch.no_grad():
        nn.init.normal_(model.norm.weight)
    scheme = {"up": "w4a16-g8-asym", "down": "w8a8-static", "conv": "w8a16", "ordered": "w4a16-g8-asym"}
    scheme |= {"twofold": "wfp4a16-g8-e4m3", "powers": "wfp4a16-g8-e8m0", "fp8": "wfp8afp8-static"}
    qcore.quantize_(model, scheme, calibration=[torch.randn(5, 13)])
    model.ordered.weight = model.ordered.weight.derived(order=torch.randperm(13).int())
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


@pytest.mark.parametrize("numbers", draws(6_000, few=400, parts=PARTS))
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


@pytest.mark.parametrize("numbers", draws(2_000, few=200, parts=PARTS))
def test_mutated_experts(tmp_path, numbers):
    torch.manual_seed(0)
    held = [qcore.quantize(torch.randn(4, 13), "fp4-g8-e4m3").derived(order=torch.randperm(13).int()) for _ in range(3)]
    path = tmp_path / "m.safetensors"
    save({"up": QTensor.stack(held), "down": QTensor.stack(held).regroup(4)}, path)
    good, outcomes = path.read_bytes(), Counter()
    for number in numbers:
        seed = f"experts {number}"
        path.unlink()
        path.write_bytes(mutations.mutate_file(good, random.Random(seed)))
        outcomes[weights_checked(path, seed)] += 1
    assert outcomes["refused"] > outcomes["loaded"] > 0, outcomes


def weights_of(path: Path) -> dict[str, QTensor]:
    with Archive.open(path) as archive:
        return {name: archive.quantized(name) for name in archive.records}


def weights_checked(path: Path, seed: str) -> str:
    """Read every quantized weight; ``refused`` or ``loaded``. Fails if a weight is not the one in the file."""
    found: dict[str, QTensor] = {}
    refusal = refusal_of(lambda: found.update(weights_of(path)))
    assert len(refusal) < CHARACTERS, seed
    if refusal:
        return "refused"
    tensors = in_file(path)
    for name, weight in found.items():
        weight.dequantize(torch.float32)
        stored = {part: tensors.get(f"{name}.{part}") for part in weight.tensors()}
        if all(value is not None for value in stored.values()):  # an alias has tensors of its own name only
            assert all(raw(stored[part]) == raw(value) for part, value in weight.tensors().items()), seed
    return "loaded"


@pytest.mark.parametrize("numbers", draws(4_000, few=250, parts=PARTS))
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
