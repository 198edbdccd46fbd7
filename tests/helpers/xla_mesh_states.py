"""States on a mesh of simulated devices, in a process of its own: ``DEVICES``."""

import sys
import warnings

import jax
import pytest
import torch
from torch import nn

import qcore
import qcore_xla
from qcore_xla.graphs.backend import qcore_xla as backend


class Counting(nn.Module):
    """An integer and a float state, both written by torch or by a program."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 32)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(1, 4, 2, 64))

    def forward(self, x, step):
        self.count.add_(step)
        self.total.add_(x)
        return self.second(self.first(self.total)) * self.count


def states(model):
    return model.count, model.total


def check(model, compiled):
    x, count, total = torch.ones(64), int(model.count), model.total.clone()
    y = compiled(x, torch.tensor(1))
    count, total = count + 1, total + x
    torch.testing.assert_close(model.total, total)
    assert int(model.count) == count
    torch.testing.assert_close(y, model.second(model.first(total)) * count, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def main(devices):
    torch.manual_seed(0)
    model = Counting()
    qcore.quantize_(model, "w8a16")
    qcore_xla.shard_(model, jax.make_mesh((devices,), ("model",)), plan={"first": "column", "second": "row"})
    compiled = torch.compile(model, backend=backend)
    with pytest.raises(OverflowError):
        compiled(torch.ones(64), torch.tensor(1 << 40))  # ends before its program, but not before its states are made
    model.total.copy_(torch.randn(model.total.shape))
    check(model, compiled)
    memory, versions = [one.data_ptr() for one in states(model)], [one._version for one in states(model)]
    check(model, compiled)
    check(model, compiled)
    assert memory == [one.data_ptr() for one in states(model)], "the states' memory is not shared"
    pairs = zip(versions, (one._version for one in states(model)), strict=True)
    assert all(before + 2 == after for before, after in pairs), "torch is not told of writes"
    model.count.fill_(40)
    model.total.mul_(3)
    check(model, compiled)
    model.total = torch.randn(1, 4, 2, 64)
    check(model, compiled)
    check_uncounted(model, compiled)
    print("equal", len(jax.devices()))


def check_uncounted(model, compiled):
    """Writes that no version of the state counts."""
    alias = torch.empty(0).set_(model.total.untyped_storage(), 0, model.total.shape)
    check(model, compiled)
    alias.copy_(torch.randn(alias.shape))
    check(model, compiled)
    with torch.inference_mode():
        model.total, model.count = torch.randn(1, 4, 2, 64), torch.tensor(7)
        check(model, compiled)
        model.total.add_(1)
        model.count.add_(1)
        check(model, compiled)


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(int(sys.argv[1]))
