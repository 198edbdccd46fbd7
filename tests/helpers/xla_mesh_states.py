"""States on a mesh of simulated devices, in a process of its own: ``DEVICES``."""

import sys
import warnings

import jax
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

    def forward(self, x):
        self.count.add_(1)
        self.total.add_(x)
        return self.second(self.first(self.total)) * self.count


def check(model, compiled):
    x, count, total = torch.ones(64), int(model.count), model.total.clone()
    y = compiled(x)
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
    check(model, compiled)
    memory, versions = [one.data_ptr() for one in model.buffers()], [one._version for one in model.buffers()]
    check(model, compiled)
    check(model, compiled)
    assert memory == [one.data_ptr() for one in model.buffers()], "the states' memory is not shared"
    assert versions != [one._version for one in model.buffers()], "torch is not told of writes"
    model.count.fill_(40)
    model.total.mul_(3)
    check(model, compiled)
    model.total = torch.randn(1, 4, 2, 64)
    check(model, compiled)
    with torch.inference_mode():
        model.total, model.count = torch.randn(1, 4, 2, 64), torch.tensor(7)
        check(model, compiled)
        model.total.add_(1)  # no version counts it
        model.count.add_(1)
        check(model, compiled)
    print("equal", len(jax.devices()))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(int(sys.argv[1]))
