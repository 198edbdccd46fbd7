"""Whole decoders compiled for TPUs from shapes alone: what their programs keep in memory and what they multiply."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from llama_shapes import SHAPES, llama, tokens
from torch import nn

from qcore_xla.graphs.ahead import compile_model

CHIPS = ["v5e", "v6e"]
SCHEMES = {
    "SmolLM2-135M": ["w4a16-g64", "w8a8", "wfp8afp8"],
    "Llama-1.1B": ["w8a16", "w4a8-g128", "mxfp4"],
    "Llama-8B": ["w4a16-g128"],
}
CASES = [(name, scheme) for name, schemes in SCHEMES.items() for scheme in schemes]
LAYERS = {"SmolLM2-135M": 3, "Llama-1.1B": 2, "Llama-8B": 2}
"""All blocks compile to the same steps; `benchmarks/xla_aot_models.py` compiles more whole models."""
PRODUCTS = 7
"""Quantized linear layers of a block."""


@cache
def compiled(name, scheme, chip, count=1):
    return compile_model(chip, llama(name, scheme, LAYERS[name]), *tokens(count))


def check_packed(model, name, scheme, layers):
    """Nothing is left to torch, weights stay packed, and there is no room for any of them unpacked."""
    assert not model.host
    shape, bits = SHAPES[name], 4 if scheme.startswith(("w4", "mxfp4")) else 8
    width, inner = shape["width"], shape["inner"]
    codes = layers * width * (2 * width + 2 * keys_of(name) + 3 * inner) + 2 * shape["vocabulary"] * width
    assert codes * bits / 8 < model.weights < 1.25 * codes * bits / 8  # with scales and padding
    assert not model.written_weights
    assert model.program.temporary < codes * bits / 8 / model.layers


def keys_of(name):
    shape = SHAPES[name]
    return shape["width"] // shape["heads"] * shape["kv_heads"]


def check_caches(model, name, layers):
    """They are updated in place."""
    assert model.states == model.aliased == 2 * layers * SHAPES[name]["length"] * keys_of(name) * 2


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_a_decoder_is_one_program_with_packed_weights(name, scheme, chip):
    check_packed(compiled(name, scheme, chip), name, scheme, LAYERS[name])


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_caches_are_updated_in_place(name, scheme, chip):
    check_caches(compiled(name, scheme, chip), name, LAYERS[name])


@pytest.mark.alternate  # three minutes of one core
def test_all_32_blocks_of_8b_for_v6e():
    """The one whole model among the tests, with room for its caches on a chip of 32 GiB."""
    name, scheme = "Llama-8B", "w4a16-g128"
    model = compile_model("v6e", llama(name, scheme), *tokens(1))
    check_packed(model, name, scheme, SHAPES[name]["layers"])
    check_caches(model, name, SHAPES[name]["layers"])
    assert model.weights + model.statics + model.states + model.program.temporary < 5 << 30


@pytest.mark.parametrize("chip", CHIPS)
def test_int8_codes_meet_on_the_matrix_unit(chip):
    program = compiled("SmolLM2-135M", "w8a8", chip).program
    assert program.factors.count(("s8", "s8")) == PRODUCTS * LAYERS["SmolLM2-135M"] + 1
    assert program.products.count("s32") == program.factors.count(("s8", "s8"))
    kernels = compiled("Llama-1.1B", "w4a8-g128", chip).program  # int4 weights are unpacked inside of a kernel
    assert sum(step.op == "custom-call" for step in kernels.steps) == PRODUCTS * LAYERS["Llama-1.1B"] + 1


def test_a_prompt_unpacks_no_weight_to_memory():
    model = compile_model("v5e", llama("Llama-1.1B", "w4a16-g128", 1), *tokens(64))
    largest = SHAPES["Llama-1.1B"]["vocabulary"] * SHAPES["Llama-1.1B"]["width"]
    assert model.program.temporary < largest // 8  # codes of int4 that are unpacked take at least one byte each
    assert model.states == model.aliased


def test_it_looks_for_what_it_should():
    """Groups that are too short for the kernel: XLA unpacks them, and the check of the other models must see that."""
    written = compile_model("v6e", llama("SmolLM2-135M", "w4a8-g32", 1), *tokens(1)).written_weights
    assert written
    assert "['data'] and writes" in written[0]


def test_a_model_that_is_no_single_program():
    class Solved(nn.Module):
        def forward(self, x):
            return torch.linalg.solve(x.relu(), x + 1).relu()

    with pytest.raises(ValueError, match="not one program"):
        compile_model("v6e", Solved(), torch.eye(3, device="meta"))
    with pytest.raises(ValueError, match="unknown TPU"):
        compile_model("v3", Solved(), torch.eye(3))
