"""How values cross between torch and programs."""

from types import SimpleNamespace

import pytest
import torch

from qcore_xla.engines import crossing

LIMIT = 1 << 31


@pytest.mark.parametrize(("values", "fits"), [
    ([0, 1, -1, LIMIT - 1, -LIMIT], True), ([LIMIT], False), ([0, -LIMIT - 1], False), ([1 << 62], False),
])  # fmt: skip
def test_integers_of_64_bits_cross_as_pairs(values, fits):
    given = torch.tensor(values)
    pairs = crossing.array_of_bytes(given)
    assert pairs.shape == (len(values), 2)
    assert pairs.unsafe_buffer_pointer() == given.data_ptr() or given.data_ptr() % 64  # not copied
    found, beyond = crossing.joined(pairs)
    assert bool(beyond) == (not fits)
    if fits:
        assert found.tolist() == values
        assert crossing.parted(found).tolist() == pairs.tolist()


def test_pairs_of_numbers_and_of_views():
    assert crossing.joined(crossing.array_of_bytes(torch.tensor(-7)))[0].tolist() == -7
    given = torch.arange(12).view(3, 4).T[1:]
    assert crossing.joined(crossing.array_of_bytes(given))[0].tolist() == given.tolist()
    floats = torch.rand(3)
    assert crossing.array_of_bytes(floats).tolist() == floats.tolist()


@pytest.mark.parametrize(("stream", "expected"), [
    (4096, [("made", 4096), ("waits", "current")]), (None, ["host waits"]), (1, ["host waits"]), (-1, ["host waits"]),
])  # fmt: skip
def test_jax_waits_for_the_stream_of_torch(monkeypatch, stream, expected):
    seen = []

    class Stream:
        def __init__(self, pointer, device):
            seen.append(("made", pointer))

        def wait_stream(self, other):
            seen.append(("waits", other))

    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(crossing, "wait_for_torch", lambda device: seen.append("host waits"))
    exported = crossing._OnGpu(torch.arange(3.0))
    capsule = exported.__dlpack__(stream=stream, max_version=None)
    assert seen == expected
    assert torch.from_dlpack(Capsule(capsule)).tolist() == [0, 1, 2]


class Capsule:
    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        return self.capsule


def test_numbers_of_device_types_are_those_of_dlpack():
    kinds = torch.utils.dlpack.DLDeviceType
    assert (kinds.kDLCUDA, kinds.kDLROCM) == (crossing._CUDA, crossing._ROCM)


@pytest.mark.parametrize(("pointer", "passed"), [(4096, 4096), (0, 1)])
def test_the_stream_of_torch_waits_for_a_result(monkeypatch, pointer, passed):
    class Result:
        def __dlpack__(self, *, stream):
            assert stream == passed
            return torch.utils.dlpack.to_dlpack(torch.arange(3))

    device = torch.device("cuda", 1)
    streams = {device: SimpleNamespace(cuda_stream=pointer)}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    assert crossing.tensor_of(Result(), device).tolist() == [0, 1, 2]
