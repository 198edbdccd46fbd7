import gc

import pytest
import torch
from graph_backends import TorchParts

from qcore import graphs
from qcore.graphs import Resident, bucket


def test_device_copies_follow_writes_and_die_with_their_tensor():
    made = []
    resident = Resident(lambda tensor: made.append(tensor.clone()) or len(made))
    tensor, other = torch.zeros(3), torch.zeros(3)
    assert [resident.get(t) for t in (tensor, tensor, other, tensor)] == [1, 1, 2, 1]
    tensor.add_(1)
    assert resident.peek(tensor) == 1
    assert resident.get(tensor) == 3
    assert torch.equal(made[-1], torch.ones(3))
    resident.put(tensor, 7)
    assert resident.get(tensor) == 7
    del tensor
    gc.collect()
    assert len(resident) == 1


def test_only_backends_that_defer_writes_are_asked_for_them():
    class Deferring(TorchParts):
        name, defers_writes, asked = "deferring", True, []

        def synchronize(self, tensors):
            self.asked.append(len(tensors))

    backend = Deferring()
    graphs.torch_compile_backend(backend)
    graphs.torch_compile_backend(TorchParts())
    try:
        graphs.synchronize(torch.nn.BatchNorm1d(2))
        graphs.synchronize(torch.ones(1))
        graphs.synchronize([torch.ones(1), 3, torch.ones(2)])
    finally:
        del graphs.states.backends["deferring"]
    assert backend.asked == [5, 1, 2]


@pytest.mark.parametrize(("length", "limits", "expected"), [
    (1, {}, 16), (16, {}, 16), (17, {}, 32), (100, {"most": 100}, 100), (3, {"least": 1}, 4), (60, {"most": 100}, 64),
])  # fmt: skip
def test_buckets(length, limits, expected):
    assert bucket(length, **limits) == expected


@pytest.mark.parametrize(("length", "limits"), [(0, {}), (-1, {}), (5, {"most": 4})])
def test_lengths_without_a_bucket(length, limits):
    with pytest.raises(ValueError, match="length is"):
        bucket(length, **limits)
