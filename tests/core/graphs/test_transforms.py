"""Compiled functions that compute derivatives within, and arguments that are no plain tensors."""

import pytest
import torch
from graph_backends import TorchParts
from torch import nn

import qcore
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
