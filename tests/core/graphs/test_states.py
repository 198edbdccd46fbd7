import gc

import pytest
import torch
from graph_backends import TorchParts

from qcore import graphs
from qcore.graphs import Resident, bucket
from qcore.graphs.states import Stamp


def test_device_copies_follow_writes_and_die_with_their_tensor():
    made = []
    resident = Resident(lambda tensor: made.append(tensor.clone()) or len(made))
    tensor, other = torch.zeros(3), torch.zeros(3)
    assert [resident.get(t) for t in (tensor, tensor, other, tensor)] == [1, 1, 2, 1]
    tensor.add_(1)
    assert resident.peek(tensor) == 1
    assert resident.get(tensor) == 3
    assert torch.equal(made[-1], torch.ones(3))
    tensor.data = torch.full((3,), 2.0)  # no version counts it
    assert resident.get(tensor) == 4
    assert torch.equal(made[-1], tensor)
    resident.put(tensor, 7)
    assert resident.get(tensor) == 7
    del tensor
    gc.collect()
    assert len(resident) == 1


def test_stamps_are_looked_at_and_renewed_together():
    tensors = [torch.zeros(2), torch.ones(3, dtype=torch.int64)]
    stamps = [Stamp(tensor) for tensor in tensors]
    assert Stamp.fit_each(stamps, tensors)
    assert not Stamp.fit_each(stamps, tensors[::-1])
    tensors[1].add_(1)
    assert not Stamp.fit_each(stamps, tensors)
    Stamp.renew_each(stamps, tensors)
    assert Stamp.fit_each(stamps, tensors)
    tensors[0].data = torch.zeros(2)  # no version counts it
    assert not Stamp.fit_each(stamps, tensors)
    Stamp.renew_each(stamps, tensors)
    assert Stamp.fit_each(stamps, tensors)
    assert all(stamp.fits(tensor) for stamp, tensor in zip(stamps, tensors, strict=True))
    with torch.inference_mode():
        uncounted = torch.zeros(2)
        assert Stamp.fit_each([Stamp(uncounted)], [uncounted])


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


@torch.no_grad()
@pytest.mark.parametrize(("defers", "given", "wanted"), [
    (True, {"refused": ["cos"]}, [[3]]), (True, {"refused": ["sin"]}, []), (True, {"fails": True}, [[2, 3]]),
    (False, {"refused": ["cos"]}, []), (False, {"fails": True}, []),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:asks_for_states")
def test_what_the_host_reads_is_brought_up_to_date(defers, given, wanted):
    class Asks(TorchParts):
        name, defers_writes, asked = "asks_for_states", defers, []

        def synchronize(self, tensors):
            self.asked.append([tensor.numel() for tensor in tensors])

    backend, x, y = Asks(**given), torch.ones(2), torch.ones(3)
    try:
        found = backend.compiled(lambda x, y: ((x + 1).sin(), y.cos() * 2))(x, y)
        torch.testing.assert_close(found, ((x + 1).sin(), y.cos() * 2))
        assert backend.asked == wanted
    finally:
        del graphs.states.backends[backend.name]
        torch._dynamo.reset()


class Deferring(TorchParts):
    """Keeps states to itself, and notes the versions of their tensors at each call."""

    name, defers_writes = "keeps_states", True

    def compile(self, part):
        self.versions, kept = [], {}

        def run(values):
            self.versions += [graphs.version(values[place]) for place in part.updates]
            values = [kept.get(place, value) for place, value in enumerate(values)]
            outputs = part.graph(*values)
            kept.update({place: outputs[at] for place, at in part.updates.items()})
            return [outputs[at] for at in part.returned]

        return run


def test_versions_count_writes_by_torch_only():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x):
            self.count.add_(x)
            return self.count * 2

    backend, model = Deferring(), Counter()
    try:
        compiled = backend.compiled(model)
        results = [compiled(torch.ones(3)) for _ in range(3)]
        assert torch.equal(torch.stack(results), torch.tensor([[2.0], [4], [6]]).expand(3, 3))
        assert backend.versions == [model.count._version] * 3
        before = model.count._version
        model.count.zero_()
        compiled(torch.ones(3))
        assert backend.versions[-1] == before + 1
    finally:
        del graphs.states.backends[backend.name]
        torch._dynamo.reset()


def test_a_backend_may_count_its_writes_itself():
    class Own(TorchParts):
        name, counts_writes = "counts_writes", True

        def compile(self, part):
            run, self.versions = super().compile(part), []

            def counting(values):
                written = [values[place] for place in part.updates]
                self.versions += [graphs.version(one) for one in written]
                return run(values)  # by `copy_`, which counts

            return counting

    backend, count = Own(), torch.zeros(3)
    try:
        compiled = backend.compiled(lambda x: count.add_(x) * 2)
        for written in (1, 1, 2):
            before = count._version
            if written == 2:
                count.zero_()
            compiled(torch.ones(3))
            assert backend.versions[-1] == before + written - 1
            assert count._version == before + written
    finally:
        del graphs.states.backends[backend.name]
        torch._dynamo.reset()


@pytest.mark.parametrize(("length", "limits", "expected"), [
    (1, {}, 16), (16, {}, 16), (17, {}, 32), (100, {"most": 100}, 100), (3, {"least": 1}, 4), (60, {"most": 100}, 64),
])  # fmt: skip
def test_buckets(length, limits, expected):
    assert bucket(length, **limits) == expected


@pytest.mark.parametrize(("length", "limits"), [(0, {}), (-1, {}), (5, {"most": 4})])
def test_lengths_without_a_bucket(length, limits):
    with pytest.raises(ValueError, match="length is"):
        bucket(length, **limits)
