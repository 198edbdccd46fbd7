"""Weights of any element in layers: kernels by their names, results, bits, and what is refused."""

from __future__ import annotations

import pytest
import torch

import qcore
from qcore import Element, Format
from qcore.contracts import EMBEDDING, LINEAR
from qcore.contracts.inputs import Draw, Shape
from qcore.formats import elements
from qcore.resolving.verification import difference
from qcore_xla import plugin

NAMES = {
    "w4a16-g128": "xla.w4a16",
    "wfp8a16": "xla.wfp8a16",
    "wfp8_e5m2a16": "xla.wfp8_e5m2a16",
    "mxfp8": "xla.wfp8a16",
    "mxfp4": "xla.wfp4a16",
    "nf4": "xla.wnf4a16",
    "wfp8afp8-g128": "xla.wfp8afp8",
    "w4afp8-static(0.5)": "xla.w4afp8",
}


@pytest.mark.parametrize(("scheme", "name"), NAMES.items())
def test_names_of_kernels(scheme, name):
    request = LINEAR.request_for(qcore.Scheme.parse(scheme), torch.device("cpu"), torch.float32, 8, 64)
    assert plugin.qcore_linear(request).kernel.name == name


@pytest.fixture
def registered():
    """Elements of another plugin: integers of 3 and 6 bits, tables of 8 bits and of 2."""
    torch.manual_seed(0)
    table = [float("nan"), *torch.randn(254).tolist(), float("inf")]
    made = [
        Element.integer(3), Element.integer(6), Element.table("any8", [elements._float32(v) for v in table]),
        Element.table("any2", [-1.5, 0.0, 0.25, 3.0]),
    ]  # fmt: skip
    for element in made:
        elements.register_element(element, "test")
    yield
    elements.forget_elements([element.name for element in made], "test")


THIRD = ["w3a16-g16", "w3a8-g16-asym", "w6a16-asym", "w6a8-aasym", "wany8a16", "wany8a16-g32-e8m0", "wany2a16-g16-fzp"]
THIRD += ["wany8afp8-g16", "w3afp8"]


@pytest.mark.parametrize("scheme", THIRD)
def test_elements_of_other_plugins(registered, scheme):
    asked = qcore.Scheme.parse(scheme)
    draw = Draw(torch.Generator().manual_seed(0))
    request = LINEAR.request_for(asked, torch.device("cpu"), torch.float32, 20, 77)
    here = draw.linear(request, Shape("here", (5,), 20, 77, weights="codes"))
    kernel = plugin.qcore_linear(request).kernel
    packed = kernel.pack(here.weight)
    assert not difference(kernel.unpack(packed), here.weight)
    verdict = LINEAR.judge(here, kernel(here.x, packed, None))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("format", ["int3-g16-asym", "any8", "any2-g16-e4m3"])
def test_tables_of_other_plugins(registered, format):
    request = qcore.EmbeddingRequest(torch.device("cpu"), torch.float32, 9, 77, Format.parse(format))
    (here,) = EMBEDDING.probe(request)
    kernel = plugin.qcore_embedding(request).kernel
    packed = kernel.pack(here.weight)
    assert not difference(kernel.unpack(packed), here.weight)
    assert EMBEDDING.judge(here, kernel(here.x, packed)).ok


def test_what_no_scheme_combines_is_refused():
    none = (None, False, False)
    wrong = {
        "int8 activations": qcore.DynamicInt8(),
        "the weight's group size": qcore.DynamicFP8(32),
    }
    for text, activation in wrong.items():
        request = qcore.LinearRequest(
            torch.device("cpu"), torch.float32, torch.float32, 8, 64, None, Format("fp8"), activation, *none
        )
        refusal = plugin.qcore_linear(request)
        assert isinstance(refusal, qcore.Refusal)
        assert text in refusal.reason
        assert "Torch ops" in refusal.reason
