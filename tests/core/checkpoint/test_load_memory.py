"""A load holds one neutral weight at a time beside the packed ones."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import qcore
from qcore import CheckpointError
from qcore.checkpoint import load_, save
from qcore.checkpoint.archive import Archive

LAYERS = 5


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))


def saved(path):
    found = model()
    qcore.quantize_(found, "w8a8")
    save(found, path)
    return found


def test_a_weight_is_read_when_those_before_are_packed(tmp_path, monkeypatch):
    trained = saved(tmp_path / "m.safetensors")
    read, earlier, waiting = Archive.quantized, [], []

    def watched(self, name):
        waiting.append(sum(one() is not None for one in earlier))
        weight = read(self, name)
        earlier.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(Archive, "quantized", watched)
    with torch.device("meta"):
        fresh = model()
    load_(fresh, tmp_path / "m.safetensors")
    assert len(waiting) == LAYERS
    assert max(waiting) <= 1
    x = torch.ones(2, 64)
    assert torch.equal(fresh(x), trained(x))


def test_a_read_that_fails_late_leaves_the_model(tmp_path, monkeypatch):
    saved(tmp_path / "m.safetensors")
    read, names = Archive.quantized, []

    def failing(self, name):
        names.append(name)
        if len(names) == LAYERS:
            raise CheckpointError("the disk is gone")
        return read(self, name)

    monkeypatch.setattr(Archive, "quantized", failing)
    fresh = model()
    before = [(id(layer), layer.weight.clone()) for layer in fresh]
    with pytest.raises(CheckpointError, match="the disk is gone"):
        load_(fresh, tmp_path / "m.safetensors")
    assert all(id(layer) == i and torch.equal(layer.weight, w) for layer, (i, w) in zip(fresh, before, strict=True))
