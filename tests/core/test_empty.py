"""Weights and inputs without elements, in every functional form: K = 0 is the bias alone, N = 0 and M = 0 nothing."""

from __future__ import annotations

import pytest
import torch
from grids import sampled

import qcore
from qcore.errors import FormatError
from qcore.weights.activations import OutputInt8, StaticInt8
from qcore.weights.quantizers import quantize
from qcore.weights.schemes import SCHEMES, Scheme

SIZES = [(4, 0), (0, 64), (0, 0), (4, 64)]
LEADS = [(0,), (3,), (), (2, 0), (2, 3)]


def parsed(text):
    scheme = Scheme.parse(text)
    activation = StaticInt8(0.1, 3) if isinstance(scheme.activation, StaticInt8) else scheme.activation
    return scheme.weight, activation, OutputInt8(0.1, 2) if scheme.output else None


@pytest.mark.parametrize("scheme", sampled(SCHEMES, 8))
def test_linear(scheme):
    weight_format, activation, output = parsed(scheme)
    for (n, k), dtype in ((size, dtype) for size in SIZES for dtype in (torch.float32, torch.bfloat16)):
        weight, bias = quantize(torch.randn(n, k), weight_format), torch.randn(n, dtype=dtype)
        for lead in LEADS:
            x = torch.randn(*lead, k, dtype=dtype, requires_grad=output is None)
            for b in (None, bias):
                y = qcore.linear(x, weight, b, activation=activation, output=output)
                assert y.shape == (*lead, n)
                if not k and output is None:
                    assert torch.equal(
                        y, torch.zeros(n, dtype=dtype).expand(y.shape) if b is None else b.expand(y.shape)
                    )
                if output is None:
                    y.float().sum().backward()
                    assert x.grad.shape == x.shape


@pytest.mark.parametrize("scheme", sampled(SCHEMES, 8))
def test_conv2d(scheme):
    weight_format, activation, output = parsed(scheme)
    for oc, ic, groups in ((4, 0, 1), (0, 2, 1), (0, 0, 1), (0, 2, 2)):
        for batch, kernel in ((0, (2, 2)), (2, (2, 2)), (2, (1, 1))):
            weight = quantize(torch.randn(oc, kernel[0] * kernel[1] * ic // groups), weight_format)
            x, bias = torch.randn(batch, ic, 3, 3, requires_grad=output is None), torch.randn(oc)
            asked = {"activation": activation, "output": output, "kernel_size": kernel, "groups": groups}
            y = qcore.conv2d(x, weight, bias, **asked)
            assert y.shape == (batch, oc, 4 - kernel[0], 4 - kernel[1])
            if output is None:
                assert torch.equal(y, bias.view(-1, 1, 1).expand(y.shape))
                y.sum().backward()
                assert x.grad.shape == x.shape


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if "a16" in scheme])
def test_embedding(scheme):
    for (v, d), lead in ((size, lead) for size in SIZES for lead in LEADS):
        weight, indices = quantize(torch.randn(v, d), Scheme.parse(scheme).weight), torch.zeros(lead, dtype=torch.int64)
        if v or not indices.numel():
            assert qcore.embedding(indices, weight).shape == (*lead, d)
        else:
            with pytest.raises((IndexError, FormatError), match="0 rows"):
                qcore.embedding(indices, weight)
