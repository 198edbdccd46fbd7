"""`StoredWeight`: parts of a weight on disk are those of the whole weight, and nothing else is read."""

from __future__ import annotations

import pytest
import torch

import qcore
from qcore.checkpoint import slices
from qcore.checkpoint.opening import open_checkpoint
from qcore.checkpoint.slices import StoredWeight
from qcore.checkpoint.values import same_bits

CPU = torch.device("cpu")
FORMATS = (
    "int4-g32-asym/plain", "int4/plain", "int8-g16/plain", "int4-g32/plain_int32", "fp8/plain", "fp4-g16-e4m3/plain",
    "nf4-g64/plain", "int4-g32-fzp/plain",
)  # fmt: skip


def equal(a, b):
    mine, theirs = a.tensors(), b.tensors()
    return mine.keys() == theirs.keys() and all(same_bits(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.fixture
def saved(tmp_path):
    def save(weight):
        qcore.save({"w": weight}, tmp_path / "w.safetensors")
        return open_checkpoint(tmp_path / "w.safetensors")

    return save


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("k", [192, 170])
def test_parts_are_those_of_the_whole_weight(saved, text, k):
    weight = qcore.quantize(torch.randn(24, k), text)
    with saved(weight) as archive:
        stored = StoredWeight(archive, "w", CPU)
        assert stored.shape == (24, k)
        assert (stored.dim(), stored.format, stored.order) == (2, weight.format, None)
        assert equal(stored.whole, weight)
        for start, length in ((0, 8), (5, 19), (0, 24)):
            assert equal(stored.narrow(-2, start, length), weight.narrow(0, start, length))
        for start, length in ((0, 64), (64, 64), (64, k - 64)):
            assert equal(stored.narrow(-1, start, length), weight.narrow(1, start, length))


def test_reads_the_bytes_of_the_part(saved, monkeypatch):
    weight = qcore.quantize(torch.randn(24, 192), "int4-g32-asym/plain")
    read, count = slices._read_at, []
    monkeypatch.setattr(slices, "_read_at", lambda f, at, into: count.append(len(into)) or read(f, at, into))
    with saved(weight) as archive:
        StoredWeight(archive, "w", CPU).narrow(-1, 64, 64)
        assert sum(count) == 24 * 32 + 2 * 24 * (4 + 1)


def test_reads_without_preadv(saved, monkeypatch):
    monkeypatch.delattr(slices.os, "preadv", raising=False)
    weight = qcore.quantize(torch.randn(8, 64), "int8-g32/plain")
    with saved(weight) as archive:
        assert equal(StoredWeight(archive, "w", CPU).narrow(-1, 32, 32), weight.narrow(1, 32, 32))


def test_weight_with_an_order_is_read_whole(saved):
    plain = qcore.quantize(torch.randn(8, 64), "int8-g32/plain")
    weight = plain.derived(order=torch.randperm(64).int())
    with saved(weight) as archive:
        stored = StoredWeight(archive, "w", CPU)
        assert torch.equal(stored.order, weight.order)
        assert equal(stored.whole, weight)
        assert equal(stored.narrow(0, 2, 3), weight.narrow(0, 2, 3))


def test_cut_inside_a_group_is_refused(saved):
    with saved(qcore.quantize(torch.randn(8, 64), "int8-g32/plain")) as archive:
        stored = StoredWeight(archive, "w", CPU)
        with pytest.raises(qcore.FormatError, match="begin and end at multiples of 32"):
            stored.narrow(-1, 8, 24)


def test_file_that_was_cut_short_is_an_error(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "_read_at", lambda file, at, into: len(into) - 1)
    with saved(qcore.quantize(torch.randn(8, 64), "int8-g32/plain")) as archive:
        stored = StoredWeight(archive, "w", CPU)
        with pytest.raises(qcore.CheckpointError, match="the file ends inside its bytes"):
            stored.narrow(0, 0, 4)
