"""Checkpoints of qcore 26.11 load with the same bits; tests/fixtures/26.11/make.py wrote them with that version."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import qcore
from qcore import QTensor
from qcore.checkpoint import inspect, load_, save
from qcore.checkpoint.values import same_bits

OLD = Path(__file__).parents[2] / "fixtures" / "26.11"
EXPECTED = json.loads((OLD / "expected.json").read_text())
CHECKPOINTS = [name for name in EXPECTED if name.endswith("safetensors") or "." not in name]


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def described(weight: QTensor) -> dict[str, object]:
    dense = digest(weight.dequantize(torch.float32))
    return {"format": str(weight.format), "quantizer": weight.quantizer, "dequantized": dense}


def fresh() -> nn.Module:
    return nn.Sequential(nn.Linear(37, 6), nn.LayerNorm(6), nn.Linear(6, 4, bias=False))


def check(model: nn.Module, name: str) -> None:
    layers = {"0": model[0], "2": model[2]}
    assert {f"{key}.weight": described(layer.weight) for key, layer in layers.items()} == EXPECTED[name]["weights"]
    assert {key: str(layer.scheme) for key, layer in layers.items()} == EXPECTED[name]["schemes"]


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_checkpoints(name, device):
    with torch.device(device):
        model = fresh()
    load_(model, OLD / name)
    check(model, name)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_saving_again_gives_the_same_tensors_and_records(tmp_path, name):
    model = fresh()
    if "fzp" in name:
        model.bfloat16()
    load_(model, OLD / name)
    size = 200 if name == "sharded" else None
    save(model, tmp_path / name, max_shard_size=size)
    old, new = (
        sorted(path.glob("*.safetensors") if path.is_dir() else [path]) for path in (OLD / name, tmp_path / name)
    )
    assert [file.name for file in old] == [file.name for file in new]
    for one, other in zip(old, new, strict=True):
        kept, written = safetensors.torch.load_file(one), safetensors.torch.load_file(other)
        assert kept.keys() == written.keys()
        assert all(same_bits(kept[key], written[key]) for key in kept)
        with safetensors.safe_open(one, "pt") as a, safetensors.safe_open(other, "pt") as b:
            assert a.metadata().keys() == b.metadata().keys()
            assert all(a.metadata()[key] == b.metadata()[key] for key in ("qcore.schema", "qcore.tensors"))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_inspect(name):
    found = inspect(OLD / name)
    assert found.version.startswith("26.11")
    assert {t.name: t.kind for t in found.quantized} == {
        key: weight["format"] for key, weight in EXPECTED[name]["weights"].items()
    }


def test_a_state_dict_of_torch_save(tmp_path):
    state = torch.load(OLD / "state_dict.pt", weights_only=True)
    model = fresh()
    qcore.quantize_(model, "w8a8-static(1.0,0)")
    model.load_state_dict(state)
    check(model, "state_dict.pt")
    save(state, tmp_path / "m.safetensors")
    again = fresh()
    load_(again, tmp_path / "m.safetensors")
    check(again, "state_dict.pt")


def test_pickled_weights():
    weights = {
        "qtensor.pickle": pickle.loads((OLD / "qtensor.pickle").read_bytes()),
        "qtensor.pt": torch.load(OLD / "qtensor.pt", weights_only=True),
    }
    for name, weight in weights.items():
        assert described(weight) == EXPECTED[name]
        assert weight.order is None
        assert weight.global_scale is None
