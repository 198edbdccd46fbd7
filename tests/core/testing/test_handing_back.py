"""A kernel that calls qcore for its own request, which qcore would hand to it again and again: it ended in SIGSEGV."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qcore
from qcore import testing
from qcore.plugin_api import why_not_encoding


class _HandsBack(qcore.Kernel):
    """Computes nothing itself."""

    def __init__(self, request, name):
        self.request, self.name = request, f"{name}.linear"

    def pack(self, weight):
        self.weight = weight
        return weight.tensors()

    def unpack(self, packed):
        return self.weight.derived(**packed)

    def __call__(self, x, packed, bias, **given):
        request = self.request
        return qcore.linear(
            x, self.unpack(packed), bias, activation=request.activation, output=request.output,
            out_dtype=None if request.output else request.out_dtype, **given,
        )  # fmt: skip


class _Plugin:
    @qcore.hookimpl
    def qcore_linear(self, request):
        reason = why_not_encoding(request)
        return qcore.Refusal(reason) if reason else qcore.Offer(_HandsBack(request, "mirror"), qcore.NATIVE)


@pytest.fixture
def mirror(add):
    return add("mirror", _Plugin())


def served(verify):
    """A layer, after a call that has to be right."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32), torch.randn(3, 64)
    with qcore.using(verify=verify):
        quantized = qcore.nn.QuantizedLinear.from_float(layer, "w4a16-g32")
        want = nn.functional.linear(x, quantized.weight.dequantize(torch.float32), layer.bias)
        torch.testing.assert_close(quantized(x), want)
        torch.testing.assert_close(quantized(x), want)
    return quantized


@pytest.mark.filterwarnings("ignore:qcore plugin 'mirror':qcore.QcoreWarning")
def test_a_call_without_verification_comes_to_an_end(mirror):
    with pytest.warns(qcore.QcoreWarning, match=r"kernel 'mirror.linear'.* is disabled"):
        served("off")


@pytest.mark.parametrize("verify", ["once", "always"])
@pytest.mark.filterwarnings("ignore:kernel 'mirror.linear':qcore.QcoreWarning")
@pytest.mark.filterwarnings("ignore:qcore plugin 'mirror':qcore.QcoreWarning")
def test_the_next_kernel_serves_and_the_reason_is_told(mirror, verify):
    quantized = served(verify)
    (again,) = [c for c in quantized.decision.candidates if c.plugin == "mirror"]
    assert quantized.decision.selected.plugin == "torch"
    assert "it calls qcore for the same request, which qcore hands to it again" in again.reason


def test_the_kit_names_the_law(mirror):
    found = testing.run(mirror, contracts=["linear"], select="linear[w4a16-bfloat16", seed=3)
    assert not found.ok
    assert "falls back secretly: its call entered qcore's functional/calls.py" in str(found)
