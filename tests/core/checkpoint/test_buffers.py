"""Buffers that no checkpoint holds, in a model on meta: computed by the module's own code, or a clear error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qcore import CheckpointError
from qcore.checkpoint import load_, save

CONFIG = SimpleNamespace(dim=8, theta=1e4)


def frequencies(config: Any, device: Any = None) -> tuple[Tensor, float]:
    return 1 / config.theta ** (torch.arange(0, config.dim, 2, device=device).float() / config.dim), 1.0


class Rotary(nn.Module):
    """Base of stand-ins for the rotary embeddings of several libraries."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cat((self.inv_freq, self.inv_freq))


class OfTransformers5(Rotary):
    def __init__(self, config: Any, layer: str) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.register_buffer("inv_freq", frequencies(config)[0], persistent=False)
        self.register_buffer("original_inv_freq", self.inv_freq.clone(), persistent=False)


class OfTransformers4(Rotary):
    def __init__(self, config: Any, layer: str) -> None:
        super().__init__()
        self.config, self.layer, self.rope_init_fn = config, layer, frequencies
        self.register_buffer("inv_freq", self.rope_init_fn(config)[0], persistent=False)
        self.original_inv_freq = self.inv_freq


class OfTorchtune(Rotary):
    def __init__(self, *_: object) -> None:
        super().__init__()
        self.rope_init()

    def rope_init(self) -> None:
        self.register_buffer("inv_freq", frequencies(CONFIG)[0], persistent=False)


class FromConfig(Rotary):
    def __init__(self, config: Any, device: Any = None) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", frequencies(config, device)[0], persistent=False)


class Model(nn.Module):
    def __init__(self, rotary: type[Rotary]) -> None:
        super().__init__()
        self.config = CONFIG
        self.up = nn.Linear(8, 8)
        self.rotary = FromConfig(CONFIG) if rotary is FromConfig else rotary(CONFIG, "full")

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
        elif isinstance(module, OfTransformers5):
            module.inv_freq.copy_(frequencies(module.config)[0])
            module.original_inv_freq.copy_(frequencies(module.config)[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.rotary(x))


@pytest.mark.parametrize("rotary", [OfTransformers5, OfTransformers4, OfTorchtune, FromConfig])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_computed_anew(tmp_path, rotary, dtype):
    source = Model(rotary).to(dtype)
    save(source, tmp_path / "m.safetensors")
    drawn = torch.get_rng_state()
    with torch.device("meta"):
        model = Model(rotary).to(dtype)
        load_(model, tmp_path / "m.safetensors")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(model.rotary.inv_freq, source.rotary.inv_freq)
    if rotary is OfTransformers4 and dtype == torch.float32:  # the same tensor by another name
        assert model.rotary.original_inv_freq is model.rotary.inv_freq
    x = torch.randn(2, 8, dtype=dtype)
    assert torch.equal(model(x), source(x))


def refused(tmp_path: Any, make: Any) -> None:
    save(make(), tmp_path / "m.safetensors")
    with torch.device("meta"):
        model = make()
    before = dict(model.named_buffers())
    with pytest.raises(
        CheckpointError, match=r"(?s)No checkpoint holds the buffer.*init_empty_weights\(include_buffers=False"
    ):
        load_(model, tmp_path / "m.safetensors")
    assert all(before[name] is buffer for name, buffer in model.named_buffers())
    assert len(str(load_(model, tmp_path / "m.safetensors", strict=False).missing)) > 2


class Odd(nn.Module):
    """``reset_parameters`` of several kinds, none of which says what is in the buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.child = kind, nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(4), persistent=False)

    def reset_parameters(self) -> None:
        if self.kind == "random":
            self.table.normal_()
        elif self.kind == "half":
            self.table[:2] = 5
        elif self.kind == "child":
            self.child.reset_parameters()
            self.table.fill_(1)
        elif self.kind == "raises":
            raise RuntimeError("not now")


@pytest.mark.parametrize("kind", ["random", "half", "child", "raises", "nothing"])
def test_what_is_not_surely_computed_is_refused(tmp_path, kind):
    refused(tmp_path, lambda: Odd(kind))


def test_parameters_on_meta_and_buffers_real(tmp_path):
    """What accelerate.init_empty_weights(include_buffers=False) makes."""
    source = Odd("nothing")
    source.table.mul_(3)
    save(source, tmp_path / "m.safetensors")
    model = Odd("nothing")
    model.table.mul_(3)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = nn.Parameter(parameter.to("meta"))
    load_(model, tmp_path / "m.safetensors")
    assert torch.equal(model.child.weight, source.child.weight)
    assert torch.equal(model.table, source.table)


class Positions(nn.Module):
    """As transformers' Marian: the table of positions is computed, and ``save_pretrained`` leaves it out."""

    _keys_to_ignore_on_save = ("positions.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.out = nn.Embedding(4, 8), nn.Linear(8, 8)


def test_computed_parameters_that_are_never_saved(tmp_path):
    model = Positions()
    state = {name: value for name, value in model.state_dict().items() if name != "positions.weight"}
    save_file(state, tmp_path / "model.safetensors")
    other = Positions()
    before = other.positions.weight.clone()
    load_(other, tmp_path / "model.safetensors")
    assert torch.equal(other.out.weight, model.out.weight)
    assert torch.equal(other.positions.weight, before)
    with torch.device("meta"):
        blank = Positions()
    with pytest.raises(CheckpointError, match=r"Missing in the checkpoint: positions\.weight"):
        load_(blank, tmp_path / "model.safetensors")
