"""Compiled models whose arguments share memory with each other, or with a tensor that the model writes."""

import pytest
import torch
from graph_backends import TorchParts
from torch import nn

import qcore
from qcore import graphs
from qcore.graphs.overlaps import MANY

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def both_written(a, b):
    a.mul_(2)
    b.add_(1)
    return a.sum() - b.sum()


def halves(x, i):
    return x[i : i + 4], x[i + 2 : i + 6]


def apart(x, i):
    return x[i : i + 4], x[i + 4 : i + 8]


@torch.no_grad()
@pytest.mark.parametrize("order", [
    [(apart, 0), (halves, 0), (apart, 1)], [(halves, 0), (apart, 0), (halves, 1)],
    [(halves, 1), (halves, 3), (halves, 1)],
])  # fmt: skip
def test_views_that_both_are_written(order):
    x, backend = torch.randn(10, 3), TorchParts()
    compiled, expected = backend.compiled(both_written), x.clone()
    for cut, i in order:
        torch.testing.assert_close(compiled(*cut(x, i)), both_written(*cut(expected, i)))
        torch.testing.assert_close(x, expected)


@torch.no_grad()
def test_views_that_do_not_overlap_share_a_program():
    x, backend = torch.randn(12, 3), TorchParts()
    compiled, expected = backend.compiled(both_written), x.clone()
    for i in range(5):
        torch.testing.assert_close(compiled(*apart(x, i)), both_written(*apart(expected, i)))
    assert len(backend.parts) == 1


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.arange(900.0).view(300, 3))

    def forward(self, x):
        self.state[:8].mul_(2)
        return self.state.sum() + x * 3


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 1])
def test_an_argument_that_is_a_view_of_a_state(first):
    model, expected, backend = Doubling(), Doubling(), TorchParts()
    compiled, x = backend.compiled(model), torch.ones(8, 3)
    for turn in range(first, first + 6):
        at = (turn // 2) * 4
        mine = x if turn % 2 == 0 else model.state[at : at + 8]
        theirs = x if turn % 2 == 0 else expected.state[at : at + 8]
        torch.testing.assert_close(compiled(mine), expected(theirs))
        torch.testing.assert_close(model.state, expected.state)


@torch.no_grad()
def test_ways_beyond_the_eighth_run_in_torch():
    x, backend = torch.randn(20, 3), TorchParts()
    compiled, expected = backend.compiled(both_written), x.clone()
    for i in range(8):
        torch.testing.assert_close(compiled(*halves(x, i)), both_written(*halves(expected, i)))
    with pytest.warns(qcore.QcoreWarning, match=MANY):
        torch.testing.assert_close(compiled(*halves(x, 8)), both_written(*halves(expected, 8)))
    for i in (9, 10, 3):
        torch.testing.assert_close(compiled(*halves(x, i)), both_written(*halves(expected, i)))
    torch.testing.assert_close(x, expected)
    assert MANY in graphs.explain().refused  # of whatever this process has compiled
