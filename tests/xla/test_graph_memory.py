"""Programs of models that are gone: JAX keeps what it has traced, and no model with it."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import qcore
from qcore.graphs import explain

jax = pytest.importorskip("jax")
apart = pytest.importorskip("qcore_xla.graphs.apart")


class Counting(nn.Module):
    """A quantized layer, and a state."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(32, width)
        self.register_buffer("sums", torch.zeros(width))
        qcore.quantize_(self, "w8a16")

    def forward(self, x):
        y = torch.where(x.sum() > 0, self.layer(x), 0.0)
        self.sums += y.sum(0)
        return y.softmax(-1)


@torch.no_grad()
def graph_of(width):
    """A weak reference to the report of a model's only graph: it lives as long as its program."""
    compiled = torch.compile(Counting(width).eval(), backend="qcore_xla")
    compiled(torch.randn(2, 32))
    return weakref.ref(explain(compiled).reports[0])


def test_programs_are_freed_with_their_model():
    graphs = [graph_of(width) for width in (24, 40)]
    torch._dynamo.reset()
    for _ in range(3):  # a state's memory is freed by one, what that kept by the next
        gc.collect()
    assert [graph() for graph in graphs] == [None, None]


def test_a_trace_has_no_frames_of_the_caller():
    assert apart.without_callers(threading.get_ident) != threading.get_ident()


def test_settings_of_the_users_thread():
    def read():
        return jax.config.jax_default_matmul_precision, jax.config.jax_default_device

    device = jax.devices("cpu")[0]
    with jax.default_device(device):
        assert apart.without_callers(read) == (None, device)
        with jax.default_matmul_precision("highest"):
            assert apart.without_callers(read) == ("highest", device)


def test_errors_reach_the_caller():
    with pytest.raises(ZeroDivisionError):
        apart.without_callers(lambda: 1 // 0)
