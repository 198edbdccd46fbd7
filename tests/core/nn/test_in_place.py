"""Results may be changed in place, as those of torch's own layers: ``y += residual``, ``nn.ReLU(inplace=True)``."""

from __future__ import annotations

import copy

import pytest
import torch
from linear_layers import SCHEMES, made
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import qcore
from qcore.nn import NeutralLinear, QuantizedConv2d, QuantizedEmbedding

SHAPES = [(64,), (4, 64), (2, 3, 64), (2, 0, 64)]
KINDS = {
    "packed": (lambda layer: layer, lambda layer: layer.weight),
    "neutral": (NeutralLinear.from_linear, lambda layer: layer.weight.qtensor()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_through_a_changed_result(scheme, shape, kind):
    make, weight_of = KINDS[kind]
    layer = make(made(scheme))
    x, residual = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], 16, requires_grad=True)
    for _ in range(2):  # the first call takes another way than the ones after it
        y = layer(x)
        y += residual
        y.mul_(3.0).sum().backward()
    torch.testing.assert_close(residual.grad, torch.full_like(residual, 6.0))
    sums = weight_of(layer).dequantize(torch.float32).sum(0)
    torch.testing.assert_close(x.grad, (6.0 * sums).expand(shape), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g8", "w8a8"])
@pytest.mark.parametrize("shape", [(2, 4, 9, 9), (4, 9, 9)])
def test_gradients_through_a_changed_image(scheme, shape):
    layer = QuantizedConv2d.from_float(nn.Conv2d(4, 6, 3), scheme)
    for _ in range(2):
        x, same = (torch.ones(shape).mul(0.5).requires_grad_() for _ in range(2))
        nn.ReLU(inplace=True)(layer(x)).sum().backward()
        torch.relu(layer(same)).sum().backward()
        assert torch.equal(x.grad, same.grad)


@pytest.mark.parametrize("kind", ["linear", "neutral", "conv2d", "embedding", "functional"])
def test_frozen_result_takes_what_is_trained(kind):
    """A result that was computed without gradients, to which a trained one is added."""
    layer = made(k=8, n=8, scheme="w8a16")
    calls = {
        "linear": (layer, torch.randn(2, 3, 8)),
        "neutral": (NeutralLinear.from_linear(layer), torch.randn(2, 3, 8)),
        "conv2d": (QuantizedConv2d.from_float(nn.Conv2d(4, 8, 3), "w8a8"), torch.randn(2, 4, 9, 10)),
        "embedding": (QuantizedEmbedding.from_float(nn.Embedding(9, 8), "w8a16"), torch.zeros(2, 3, dtype=torch.int64)),
        "functional": (lambda x: qcore.linear(x, layer.weight), torch.randn(2, 3, 8)),
    }
    call, x = calls[kind]
    trained = torch.ones(8, requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            y = call(x)
        y += trained
        y.sum().backward()
    assert torch.equal(trained.grad, torch.full((8,), 2.0 * y.numel() / 8))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(64, 16), nn.Linear(64, 8), nn.Linear(64, 8)

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def attention():
    """The layers, and the same ones as siblings, which share a product."""
    torch.manual_seed(0)
    alone = nn.Sequential(Attention())
    qcore.quantize_(alone, "w8a16")
    fused = copy.deepcopy(alone)
    qcore.fuse_(fused)
    return alone, fused


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64)])
def test_siblings_are_changed_each(shape):
    alone, fused = attention()
    x = torch.randn(shape)
    for _ in range(2):
        gradients = []
        for model in (alone, fused):
            own = x.clone().requires_grad_()
            q, k, v = model(own)
            q += 1.0
            (q.relu_().sum() + k.mul_(2.0).sum() + v.sum()).backward()
            gradients.append(own.grad)
        torch.testing.assert_close(*gradients)


def test_siblings_without_gradients_take_what_is_trained():
    (_, fused), trained = attention(), torch.ones(16, requires_grad=True)
    with torch.no_grad():
        q, k, _ = fused(torch.randn(2, 3, 64))
    before = k.clone()
    q += trained
    q.sum().backward()
    assert torch.equal(trained.grad, torch.full((16,), 6.0))
    assert torch.equal(k, before)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_changed_results_are_compiled(shape):
    layer = made()

    def step(x, residual):
        y = layer(x)
        y += residual
        return y.relu_()

    x, residual = torch.randn(shape), torch.randn(*shape[:-1], 16)
    found, expected = ([t.clone().requires_grad_() for t in (x, residual)] for _ in range(2))
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*found), step(*expected))
    compiled(*found).sum().backward()
    step(*expected).sum().backward()
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_traced_results_are_those_of_x():
    """A result that a tracer lost sight of would be a constant of its graph."""
    layer, x, other = made(), torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    with torch.no_grad():
        layer(x)
        graph = make_fx(layer)(x)
        assert torch.equal(graph(other), layer(other))
