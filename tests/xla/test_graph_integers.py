"""Integers of 64 bits in programs, which compute them in 32: right, or an error."""

import pytest
import torch
from graph_backends import part_of
from torch import nn

from qcore.graphs import PartRefused
from qcore_xla.graphs.backend import qcore_xla
from qcore_xla.graphs.program import Program

X, LARGE = torch.arange(1, 10), torch.full((4,), 1 << 30)
ZEROS, PLACES = torch.zeros(3, dtype=torch.long), X % 3

FIT = {
    "mul": (lambda x: x * 200_011 % 97, X), "pow": (lambda x: x**5, X), "prod": (lambda x: x.prod(), X),
    "cumsum": (lambda x: x.cumsum(0), X), "add": (lambda x: x + (x - 1), LARGE),
    "back": (lambda x: x - x - x, -LARGE), "scaled": (lambda x: torch.add(x, x, alpha=-3), X),
    "scatter_add": (lambda x: ZEROS.scatter_add(0, PLACES, x), X), "neg": (lambda x: -x - x, LARGE),
    "to": (lambda x: (x.float() / 3).long(), LARGE), "nan": (lambda x: (x.float() / 0).isnan().long(), X),
    "mm": (lambda x: x.view(3, 3) @ x.view(3, 3), X),
    "index_put": (lambda x: ZEROS.index_put((PLACES,), x, accumulate=True), X),
    "div": (lambda x: torch.div(x + 1, 3, rounding_mode="trunc"), LARGE), "quotient": (lambda x: LARGE // -x[:4], X),
    "least": (lambda x: x.topk(2, largest=False)[0], torch.tensor([3, 0, 200, 1], dtype=torch.uint8)),
    "inf": (lambda x: torch.where(x > 3, 1 + (x - 3).relu().float().log2().long(), x), X),
}  # fmt: skip
DO_NOT_FIT = {
    "mul": (lambda x: x * 2_000_000_011 % 97, X), "pow": (lambda x: x**15, X), "prod": (lambda x: (x + 20).prod(), X),
    "cumsum": (lambda x: x.cumsum(0), LARGE), "sum": (lambda x: x.sum(), LARGE), "add": (lambda x: x + x, LARGE),
    "sub": (lambda x: -x - x - x, LARGE), "scaled": (lambda x: torch.add(x, x, alpha=4), LARGE),
    "scatter_add": (lambda x: ZEROS.scatter_add(0, PLACES[:4], x), LARGE), "neg": (lambda x: -(-x - x), LARGE),
    "to": (lambda x: (x.float() * 3).long(), LARGE),
    "mm": (lambda x: x.view(2, 2) @ x.view(2, 2), LARGE),
    "index_put": (lambda x: ZEROS.index_put((PLACES[:4],), x, accumulate=True), LARGE),
}  # fmt: skip


def run(function, x):
    (y,) = Program(part_of(function, x))([x])
    return y


@pytest.mark.parametrize("name", FIT)
def test_integers_that_fit(name):
    function, x = FIT[name]
    assert torch.equal(run(function, x), function(x))


@pytest.mark.parametrize("name", DO_NOT_FIT)
def test_integers_that_do_not_fit(name):
    function, x = DO_NOT_FIT[name]
    with pytest.raises(PartRefused, match="32 bits") as refused:
        run(function, x)
    assert refused.value.once


class Counters(nn.Module):
    """As the layers of transformers' static caches have them."""

    def __init__(self):
        super().__init__()
        for name in "abc":
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        places = torch.stack([torch.arange(x.shape[0]) + count for count in (self.a, self.b, self.c)])
        for step, count in enumerate((self.a, self.b, self.c)):
            count.add_(x.shape[0] + step)
        return places + x.to(torch.int64)


@torch.no_grad()
def test_counters():
    model, x = Counters(), torch.zeros(2)
    compiled = torch.compile(model, backend=qcore_xla)
    model.c.sub_(1)
    for turn in range(3):
        firsts = [turn * 2, turn * 3, turn * 4 - 1]
        assert compiled(x).tolist() == [[first, first + 1] for first in firsts]
    assert [int(one) for one in (model.a, model.b, model.c)] == [6, 9, 11]
    model.b.fill_(1 << 40)
    with pytest.raises(OverflowError, match="32 bits"):
        compiled(x)
