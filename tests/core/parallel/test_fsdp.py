"""Adapters over sharded frozen weights, and checkpoints for any number of ranks: FSDP2 and DCP on gloo ranks."""

from __future__ import annotations

import os

import fsdp_cases
import gloo
import pytest
import torch
import torch.distributed.checkpoint as dcp


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two ranks found, after one process had written a checkpoint for them."""
    base = tmp_path_factory.mktemp("fsdp")
    before = os.environ.get("QCORE_CACHE_DIR")
    os.environ["QCORE_CACHE_DIR"] = str(base / "two" / "cache")
    try:
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.save(fsdp_cases.mixed(seed=7).state_dict(), checkpoint_id=base / "by1")
    finally:
        if before is None:
            del os.environ["QCORE_CACHE_DIR"]
        else:
            os.environ["QCORE_CACHE_DIR"] = before
    return base, run(2, base / "two")


@pytest.fixture(scope="module")
def of_three(found):
    """What three ranks read of the files of one and two; they write some of their own."""
    return run(3, found[0] / "three", ("saving", "loading"))


def run(world, folder, names=None):
    every = gloo.run("fsdp_cases", world, folder, names)
    for name, values in every.items():
        assert not any(isinstance(v, str) and v.startswith("raised ") for v in values), f"{name}: {values}"
    return every


def test_adapters_train_as_in_one_process(found):
    for rank in found[1]["qlora"]:
        one, many = rank["losses"]
        assert many == pytest.approx(one, rel=1e-5)
        assert one[-1] < one[0]
        assert rank["adapter"] < 1e-4


def test_each_rank_holds_half_of_the_frozen_bytes(found):
    ranks = found[1]["qlora"]
    assert sum(rank["held"] for rank in ranks) == ranks[0]["whole"]
    assert all(rank["held"] == pytest.approx(rank["whole"] / 2, rel=0.02) for rank in ranks)


def test_report_counts_the_bytes_of_the_rank(found):
    for rank in found[1]["qlora"]:
        assert rank["layers"] == 7
        assert rank["reported"] == rank["held"]


def test_every_kind_of_weight_is_sharded(found):
    for rank in found[1]["every scheme"]:
        assert len(rank) == 6
        assert all(value < 1e-6 for value in rank.values()), rank


def test_scales_are_not_cast(found):
    for rank in found[1]["mixed precision"]:
        assert "weight.scale was cast to torch.bfloat16" in rank["message"]
        assert rank["same"] == dict.fromkeys(rank["same"], True)
        assert len(rank["same"]) == 4


def test_sharded_weight_is_not_called(found):
    assert all("sharded over ranks" in message for message in found[1]["outside"])


def test_two_ranks_read_what_one_and_two_have_written(found):
    assert found[1]["loading"] == [{"by1": True, "by2": True}] * 2


def test_three_ranks_read_what_others_have_written(of_three):
    assert of_three["loading"] == [{"by1": True, "by2": True, "by3": True}] * 3


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_one_process_reads_what_ranks_have_written(found, of_three, ranks):
    wanted, model = fsdp_cases.mixed(seed=7).state_dict(), fsdp_cases.mixed(seed=9)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=found[0] / f"by{ranks}")
    model.load_state_dict(state)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_load_in_place_into_packed_layers_is_seen(found):
    for errors in found[1]["packed in place"]:
        assert errors == dict.fromkeys(("w8a16", "w4a16-g32", "w4a16-g32-asym"), 0.0)
