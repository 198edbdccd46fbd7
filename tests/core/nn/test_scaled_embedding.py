"""Embeddings with a forward of their own that multiplies rows by a number, as those of Gemma and Bart."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import qcore
from qcore.nn.scaled_embedding import QuantizedScaledEmbedding, is_scaled_embedding

IDS = torch.tensor([[1, 7, 3], [0, 1, 1]])
SCALE = math.sqrt(33)


class WithNumber(nn.Embedding):
    def __init__(self, *sizes, embed_scale=SCALE):
        super().__init__(*sizes)
        self.embed_scale = embed_scale

    def forward(self, input_ids):
        return super().forward(input_ids) * self.embed_scale


class WithBuffer(nn.Embedding):
    def __init__(self, *sizes, embed_scale=SCALE):
        super().__init__(*sizes)
        self.scalar_embed_scale = embed_scale
        self.register_buffer("embed_scale", torch.tensor(embed_scale), persistent=False)

    def forward(self, input_ids):
        return super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)


class Added(WithNumber):
    def forward(self, input_ids):
        return super(WithNumber, self).forward(input_ids) + self.embed_scale


class Twice(WithNumber):
    def forward(self, input_ids):
        return super(WithNumber, self).forward(input_ids) * self.embed_scale * self.embed_scale


class Shifted(WithNumber):
    def forward(self, input_ids):
        return super(WithNumber, self).forward(input_ids + 1) * self.embed_scale


class Normed(WithNumber):
    def forward(self, input_ids):
        return nn.functional.normalize(super(WithNumber, self).forward(input_ids) * self.embed_scale)


class Fails(WithNumber):
    def forward(self, input_ids):
        return super(WithNumber, self).forward(input_ids, self.embed_scale)


class Model(nn.Module):
    def __init__(self, kind, tied=False):
        super().__init__()
        self.embed = kind(8, 32)
        self.head = nn.Linear(32, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def as_float(kind, layer):
    """The float layer of a class with the values of a quantized one."""
    made = kind(8, 32)
    made.weight = nn.Parameter(layer.weight.dequantize())
    return made


@pytest.mark.parametrize("kind", [WithNumber, WithBuffer])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_those_of_the_float_layer(kind, dtype):
    model = Model(kind)
    report = qcore.quantize_(model, "w8a16")
    assert report["embed"].kind == "QuantizedScaledEmbedding"
    wanted = as_float(kind, model.embed).to(dtype)(IDS)
    model.to(dtype)
    assert torch.equal(model.embed(IDS), wanted)
    assert torch.equal(copy.deepcopy(model.embed)(IDS), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(model.embed))(IDS), wanted)


@pytest.mark.parametrize("kind", [WithNumber, WithBuffer])
def test_a_tied_head_is_quantized_too(kind):
    model = Model(kind, tied=True)
    assert len(qcore.quantize_(model, "w8a16").by_state("quantized")) == 2
    assert model.head._store is model.embed._store


@pytest.mark.parametrize("kind", [WithNumber, WithBuffer])
@pytest.mark.parametrize("on_meta", [False, True])
def test_a_model_that_a_checkpoint_is_loaded_into(kind, on_meta, tmp_path):
    model = Model(kind)
    qcore.quantize_(model, "w8a16")
    qcore.save(model, tmp_path / "own.safetensors")
    with torch.device("meta" if on_meta else "cpu"):
        fresh = Model(kind)
    qcore.load_(fresh, tmp_path / "own.safetensors", strict=False)
    assert torch.equal(fresh(IDS), model(IDS))


@pytest.mark.parametrize("kind", [WithNumber, WithBuffer])
def test_the_float_layer_can_be_made_again(kind):
    layer = QuantizedScaledEmbedding.from_float(kind(8, 32), "w8a16")
    again = layer.empty_float()
    assert type(again) is kind
    again.weight = nn.Parameter(layer.weight.dequantize())
    assert torch.equal(again(IDS), layer(IDS))


@pytest.mark.parametrize("kind", [Added, Twice, Shifted, Normed, Fails])
def test_other_forwards_are_refused(kind):
    assert not is_scaled_embedding(kind(8, 32))
    assert "overrides the forward" in qcore.quantize_(Model(kind), "w8a16")["embed"].reason


def test_what_else_is_no_scaled_embedding():
    patched, without = WithNumber(8, 32), WithNumber(8, 32)
    patched.forward = lambda ids: ids
    del without.embed_scale
    several = WithNumber(8, 32, embed_scale=torch.ones(32))
    for module in (patched, without, several, nn.Linear(8, 8), nn.Embedding(8, 32)):
        assert not is_scaled_embedding(module)


def test_recognizing_uses_no_random_numbers():
    module = type("Fresh", (WithNumber,), {})(8, 32)
    before = torch.random.get_rng_state()
    assert is_scaled_embedding(module)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_it_is_not_cut_into_parts():
    from qcore.parallel.embedding import VocabParallelEmbedding

    layer = QuantizedScaledEmbedding.from_float(WithNumber(8, 32), "w8a16")
    with pytest.raises(qcore.UnsupportedError, match="leave it whole"):
        VocabParallelEmbedding.from_embedding(layer)
