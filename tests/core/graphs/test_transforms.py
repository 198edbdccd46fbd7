"""Compiled functions that compute derivatives within, and arguments that are no plain tensors."""

import pytest
import torch
from graph_backends import TorchParts
from torch import nn

import qcore
from qcore.graphs import base_name
from qcore.graphs.capture import INNER_GRADIENTS

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).requires_grad_(False)


@pytest.mark.parametrize("transform", [
    lambda of: torch.func.grad(lambda x: of(x).sum()),
    lambda of: torch.func.vmap(torch.func.grad(lambda x: of(x).sum())),
    torch.func.jacrev, lambda of: lambda x: torch.func.vjp(of, x)[1](torch.ones(3, 4))[0],
])  # fmt: skip
@pytest.mark.parametrize("enabled", [False, True])
def test_gradients_within_a_graph(transform, enabled):
    function, x = transform(model()), torch.randn(3, 8)
    with torch.set_grad_enabled(enabled), pytest.warns(qcore.QcoreWarning, match=INNER_GRADIENTS.partition(" (")[0]):
        found = TorchParts().compiled(function)(x)
    assert found.abs().max() > 0
    torch.testing.assert_close(found, function(x))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_derivatives_within_a_graph():
    own, x, backend = model(), torch.randn(3, 8), TorchParts()

    def function(x):
        return torch.func.jvp(own, (x,), (torch.ones_like(x),))

    for one, other in zip(backend.compiled(function)(x), function(x), strict=True):
        torch.testing.assert_close(one, other)
    assert backend.parts


@torch.no_grad()
def test_jagged_tensors_run_in_torch():
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    with pytest.warns(qcore.QcoreWarning, match="this graph runs in torch"):
        y = TorchParts().compiled(lambda x: x * 2 + 1)(x)
    assert torch.equal(y.values(), x.values() * 2 + 1)


class Layers(nn.Module):
    """One layer of each kind, for images (2, 4, 5, 5)."""

    def __init__(self):
        super().__init__()
        convolution = nn.Conv2d(4, 8, 3, padding=1)
        self.convolution = qcore.nn.QuantizedConv2d.from_float(convolution, "w8a16")
        self.linear = qcore.nn.QuantizedLinear.from_float(nn.Linear(8, 4), "w8a16")
        self.table = qcore.nn.QuantizedEmbedding.from_float(nn.Embedding(9, 4), "w8a16")
        self.norm = nn.LayerNorm(4)

    def forward(self, x, ids):
        return self.norm(self.linear(self.convolution(x).amax((-2, -1)))) + self.table(ids)


@torch.no_grad()
@pytest.mark.parametrize("at", [0, 1, -1])
def test_a_batch_of_vmap_is_one_node_a_layer(at):
    torch.manual_seed(0)
    own, backend = Layers().eval(), TorchParts()
    function = torch.vmap(lambda x, ids: own(x, ids) * 1, in_dims=(at, None))  # at a module torch breaks graphs
    given = torch.randn(7, 2, 4, 5, 5).movedim(0, at), torch.tensor([3, 8])
    torch.testing.assert_close(backend.compiled(function)(*given), function(*given))
    (part,) = backend.parts
    names = [base_name(node.target) for node in part.nodes]
    assert [names.count(name) for name in ("conv2d", "linear", "embedding")] == [1, 1, 1]
    assert len(names) < 20


@torch.no_grad()
def test_a_batch_of_biases():
    torch.manual_seed(0)
    own, bias = qcore.nn.QuantizedLinear.from_float(nn.Linear(8, 4), "w8a16"), torch.randn(3, 4)

    def function(x, bias):
        return torch.func.functional_call(own, {"bias": bias}, (x,))

    call, x = torch.vmap(function, in_dims=(None, 0)), torch.randn(5, 8)
    torch.testing.assert_close(TorchParts().compiled(call)(x, bias), call(x, bias))


@torch.no_grad()
def test_a_batch_of_experts_and_their_ends():
    torch.manual_seed(0)
    own = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(3, 4, 8), "w8a16")
    call, x = torch.vmap(lambda x, ends: own(x, ends) * 1), torch.randn(2, 6, 8)
    ends = torch.tensor([[2, 3, 6], [1, 4, 6]], dtype=torch.int32)
    torch.testing.assert_close(TorchParts().compiled(call)(x, ends), call(x, ends))
