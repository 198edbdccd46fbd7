"""Floats that kernels read, in a graph of several layers whose gradients are recorded: dynamo loses shared ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qcore.nn import QuantizedConv2d, QuantizedLinear

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]
SCHEMES = [
    "w8a16", "w8a8", "w8a8-aasym", "w4a8-g8-asym", "w8a8-static(0.05,3)", "w4a8-g8-static(0.05,3)",
    "wfp8afp8", "wfp8afp8-g8", "wfp8afp8-static(0.01)",
]  # fmt: skip


def check(model, x):
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    y = compiled(x)
    assert y.requires_grad
    torch.testing.assert_close(y, model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_that_share_a_kernel(scheme):
    torch.manual_seed(0)
    first, second = (QuantizedLinear.from_float(nn.Linear(40, 40), scheme) for _ in range(2))
    check(nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), first), torch.randn(3, 5, 40))


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-static(0.05,3)", "wfp8afp8"])
def test_convolutions_that_share_a_kernel(scheme):
    torch.manual_seed(0)
    layer = QuantizedConv2d.from_float(nn.Conv2d(3, 3, 3), scheme)
    check(nn.Sequential(layer, nn.Tanh(), layer), torch.randn(2, 3, 9, 9))
