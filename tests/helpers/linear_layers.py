"""What the tests in test_linear, test_linear_copies share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qcore.nn import QuantizedLinear

SCHEMES = ["w8a16", "w4a16-g32", "w4a16-g32-asym", "w4a16-g32-fzp", "w8a8", "w4a8-g32-asym"]


FLOAT_SCHEMES = SCHEMES[:4]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def made(scheme="w4a16-g32", k=64, n=16, bias=True, dtype=torch.float32):
    return QuantizedLinear.from_float(nn.Linear(k, n, bias=bias, dtype=dtype), scheme)


def dense(layer, x, dtype=torch.float64):
    """The layer without rounding: float64 products with the dequantized weight."""
    y = x.to(dtype) @ layer.weight.dequantize(dtype).t()
    return y if layer.bias is None else y + layer.bias.detach().to(dtype)


def _without(state, key):
    return {name: value for name, value in state.items() if name != key}


def _gradients(layer, x, weights):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    (layer(x) * weights).sum().backward()
    return x.grad, None if layer.bias is None else layer.bias.grad.clone()


def _counting():
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    return graphs, backend
