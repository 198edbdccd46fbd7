"""A decoder compiled for the eight cores of a TPU v5e-8: what they tell each other, what each of them holds."""

from __future__ import annotations

from functools import cache

import pytest
from llama_shapes import SHAPES, llama, tokens

import qcore_xla
from qcore_xla import aot
from qcore_xla.graphs.ahead import compile_model

DEVICES, LAYERS = 8, 2


@cache
def compiled(scheme, scales="global"):
    model = llama("Llama-8B", scheme, LAYERS)
    assert len(qcore_xla.shard_(model, aot.mesh("v5e:2x4"), scales=scales)) == 7 * LAYERS
    return compile_model("v5e", model, *tokens(1))


@pytest.mark.parametrize(
    ("scheme", "scales", "each"), [("w4a16-g128", "global", 2), ("w8a8", "local", 2), ("w8a8", "global", 4)]
)
def test_two_all_reduces_a_block(scheme, scales, each):
    """Global scales need the largest value of a whole token, too, before each of the two layers that are summed."""
    assert compiled(scheme, scales).program.collectives == {"all-reduce": each * LAYERS}


@pytest.mark.parametrize("scheme", ["w4a16-g128", "w8a8"])
def test_each_core_holds_its_part(scheme):
    model, shape = compiled(scheme), SHAPES["Llama-8B"]
    keys = shape["width"] // shape["heads"] * shape["kv_heads"]
    assert model.states == model.aliased == 2 * LAYERS * shape["length"] * keys * 2 // DEVICES
    bits, width = 4 if "w4" in scheme else 8, shape["width"]
    blocks = LAYERS * width * (2 * width + 2 * keys + 3 * shape["inner"]) // DEVICES
    codes = blocks + 2 * shape["vocabulary"] * width  # the table and the head are whole
    assert codes * bits / 8 < model.weights < 1.1 * codes * bits / 8
    assert not model.written_weights
    assert not model.host
