"""Batches of many lengths, padded to buckets, need few compilations: of an encoder as sentence embedders have it."""

import jax
import pytest
import torch
from jax import monitoring
from tiny_models import Encoder

import qcore
from qcore import graphs
from qcore_xla.graphs.backend import qcore_xla

LENGTHS = (3, 5, 9, 16, 17, 21, 30, 33, 47, 60, 64, 12, 7)
SIZES = (1, 16, 1, 3, 16, 7, 1, 9, 2, 16, 4, 5, 12)
MOST = 10
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations():
    """The durations of JAX's compilations from here on."""
    found = []

    def listen(event, duration, **_):
        if event == COMPILED:
            found.append(duration)

    torch._dynamo.reset()
    monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax._src.monitoring.unregister_event_duration_listener(listen)
    torch._dynamo.reset()


def padded(x, rows, length):
    return torch.nn.functional.pad(x, (0, length - x.shape[1], 0, rows - x.shape[0]))


@torch.no_grad()
def test_sentences_of_thirteen_shapes(compilations):
    torch.manual_seed(0)
    model = Encoder(layers=1).eval()
    qcore.quantize_(model, "w8a16")
    plain, compiled = model.forward, torch.compile(model, backend=qcore_xla)
    whole, wanted = [], []
    for rows, length in zip(SIZES, LENGTHS, strict=True):
        ids, mask = torch.randint(0, 96, (rows, length)), torch.ones(rows, length, dtype=torch.long)
        mask[-1, length // 2 + 1 :] = 0
        room = graphs.bucket(rows, least=4, most=16), graphs.bucket(length, least=16, most=64)
        whole.append(compiled(padded(ids, *room), padded(mask, *room))[:rows])
        wanted.append((ids, mask))
    assert 1 < len(compilations) <= MOST
    for y, (ids, mask) in zip(whole, wanted, strict=True):
        torch.testing.assert_close(y, plain(ids, mask), rtol=1e-4, atol=1e-4)
    assert not graphs.explain(compiled).host
