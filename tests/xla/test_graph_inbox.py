"""The places of a program's small arguments: here on the CPU, where programs do without."""

import pytest
import torch

from qcore_xla.graphs import inbox
from qcore_xla.graphs.crossing import joined


@pytest.fixture
def waits(monkeypatch):
    found = []
    monkeypatch.setattr(inbox, "wait_for_torch", found.append)
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
