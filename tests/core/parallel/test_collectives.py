"""Collectives under transforms of torch.func: each rank would get derivatives of its own part only."""

from __future__ import annotations

import pytest
import torch

from qcore.errors import UnsupportedError
from qcore.parallel.ranks import Ranks

# torch scripts its own decompositions at the first derivative in forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
CALLS = {
    "sum": lambda ranks, x: ranks.sum(x),
    "shared": lambda ranks, x: ranks.shared(x),
    "joined": lambda ranks, x: ranks.joined(x, (4, 4)),
    "max": lambda ranks, x: ranks.max(x),
    "overlapped": lambda ranks, x: torch.cat(ranks.overlapped([x])),
}


@pytest.mark.parametrize("name", CALLS)
def test_collectives_refuse_transforms(name):
    ranks = object.__new__(Ranks)  # no collective is reached, so there need not be a second rank
    ranks.group, ranks.rank, ranks.size, ranks._all_reduce = None, 0, 2, None
    x = torch.ones(3, 4)

    def call(x):
        return CALLS[name](ranks, x)

    for transformed in (lambda: torch.func.jvp(call, (x,), (x,)), lambda: torch.func.grad(lambda x: call(x).sum())(x)):
        with pytest.raises(UnsupportedError, match="no derivatives under transforms"):
            transformed()
    assert ranks.shared(x) is x
