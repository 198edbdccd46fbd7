"""The places of a program's small arguments: here on the CPU, where programs do without."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from qcore_xla.engines import inbox
from qcore_xla.engines import jax as engine
from qcore_xla.engines.crossing import joined


@pytest.fixture
def waits(monkeypatch):
    found = []
    monkeypatch.setattr(inbox, "wait_for_torch", lambda device, stream: found.append(device))
    return found


def test_values_arrive_at_the_same_place(waits):
    box = inbox.Inbox()
    with torch.inference_mode():
        first = box.arrays([torch.tensor([[7, -3]]), torch.ones(2, 3)])
        pointers = [array.unsafe_buffer_pointer() for array in first]
    ids, mask = torch.arange(4)[None, ::2], torch.full((3, 2), 0.5, requires_grad=True).T
    second = box.arrays([ids, mask])
    assert [array.unsafe_buffer_pointer() for array in second] == pointers
    assert joined(second[0])[0].tolist() == [[0, 2]]
    assert second[1].tolist() == [[0.5] * 3] * 2
    assert waits == [torch.device("cpu")] * 2


def test_large_arguments_do_not_lie_there(waits):
    assert inbox.Inbox().arrays([torch.zeros(3), torch.zeros(inbox.LARGEST)]) is None
    assert not waits


def test_layers_have_places_by_shape_and_dtype(waits):
    boxes = inbox.Inboxes()
    first = boxes.arrays([torch.ones(1, 8)])[0]
    other = boxes.arrays([torch.ones(1, 8, dtype=torch.bfloat16)])[0]
    again = boxes.arrays([torch.full((8, 2), 3.0).T[:1]])[0]
    assert again.unsafe_buffer_pointer() == first.unsafe_buffer_pointer() != other.unsafe_buffer_pointer()
    assert again.tolist() == [[3.0] * 8]
    assert boxes.arrays([torch.zeros(4, dtype=torch.int64)]) is None
    assert boxes.arrays([torch.zeros(1 << 18)]) is None
    assert len(waits) == 3


def test_the_oldest_places_are_given_up(waits):
    boxes = inbox.Inboxes()
    for n in range(1, 200):
        assert boxes.arrays([torch.full((n,), float(n))])[0].tolist() == [n] * n
    assert len(boxes._known) == inbox._MOST
    assert waits


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(engine, "_on_gpu", lambda tensors: engine._inboxes().arrays(tensors))
    own = SimpleNamespace(tensor_of=lambda array, device: from_dlpack(array))
    monkeypatch.setattr(engine, "_crossing", lambda: own)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_layer_is_called_from_several_threads(waits):
    own, weight, wrong = engine.JaxEngine(), torch.randn(16, 16), []

    def product(x, w, form):
        return x @ w.T

    def work(seed):
        draw = torch.Generator().manual_seed(seed)
        for _ in range(60):
            x = torch.randn(int(torch.randint(1, 9, (), generator=draw)), 16, generator=draw)
            y = own._run_on_gpu(product, None, [x, weight], (0,))
            if not torch.allclose(y, x @ weight.T, atol=1e-4):
                wrong.append(x)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not wrong
    assert waits


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_error_frees_the_places(waits):
    own, x = engine.JaxEngine(), torch.ones(2, 4)

    def fails(x, form):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        own._run_on_gpu(fails, None, [x], (0,))
    assert own._run_on_gpu(lambda x, form: x + 1, None, [x], (0,)).tolist() == [[2.0] * 4] * 2
    assert waits
