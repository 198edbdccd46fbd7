"""Writes by a mask become a choice, which every backend has, unless each chosen element has a value of its own."""

import pytest
import torch
from graph_backends import TorchParts

from qcore import graphs
from qcore.graphs import base_name

pytestmark = pytest.mark.usefixtures("fresh_compiler")
X = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
ALL, ROW, COLUMN = slice(None), torch.tensor([True, False, True, False]), X[0, :, 0] > 0


def run(function, refused=()):
    """The names of the nodes of the parts, after a comparison with eager mode."""
    backend = TorchParts(refused=refused)
    with torch.no_grad():
        y = backend.compiled(function)(X.clone())
        assert torch.equal(y, function(X.clone()))
    return [base_name(node.target) for part in backend.parts for node in part.nodes]


def put(x, values, *indices):
    y = x * 1
    y[indices] = values
    return y


@pytest.mark.parametrize("function", [
    lambda x: put(x, torch.tensor(2.0), x > 0), lambda x: put(x, torch.tensor([[7.0]]), x > 0),
    lambda x: put(x, x[0, 0], x[:, :, 0] > 0), lambda x: put(x, x[1], ROW), lambda x: put(x, x[1:2], ROW),
    lambda x: put(x.long(), torch.tensor(-3), x > 0), lambda x: put(x > 1, torch.tensor(True), x < -1),
    lambda x: put(x, x[:, :1], ALL, COLUMN), lambda x: put(x, x[:, 0, :1], ALL, x[0] > 0),
    lambda x: put(x, torch.tensor(1.0), ALL, ALL, torch.arange(6) > 2),
    lambda x: put(x, torch.tensor(1.0), torch.zeros(4, dtype=torch.bool)),
])  # fmt: skip
def test_one_value_for_all(function):
    names = run(function, refused=("index_put",))
    assert names.count("where") == 1
    assert not graphs.explain().host


@pytest.mark.parametrize("function", [
    lambda x: put(x, x[:2] * 2, ROW), lambda x: put(x, x[1:2], torch.tensor([2])),
    lambda x: torch.index_put(x * 1, (ROW,), x[1], accumulate=True),
])  # fmt: skip
def test_values_of_their_own_stay(function):
    names = run(function)
    assert names.count("index_put") == 1
    assert "where" not in names


def test_a_buffer_is_written_in_place():
    class Filled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.ones(4, 5, 6))

        def forward(self, x):
            self.seen[x > 0] = 0.0
            return self.seen + x

    model, plain, backend = Filled(), Filled(), TorchParts(refused=("index_put",))
    compiled = backend.compiled(model)
    for turn in (X, X.flip(0)):
        assert torch.equal(compiled(turn), plain(turn))
    assert torch.equal(model.seen, plain.seen)
    (part,) = backend.parts
    assert len(part.updates) == 1
