"""State dicts and checkpoints of a model that is cut over two ranks: all of it, or an error."""

from __future__ import annotations

import gloo
import parallel_state_cases
import pytest


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    every = gloo.run("parallel_state_cases", 2, tmp_path_factory.mktemp("states"))
    for name, values in every.items():
        assert not any(isinstance(v, str) and v.startswith("raised ") for v in values), f"{name}: {values}"
    return every


@pytest.mark.parametrize("how", ["state", "cpu", "full", "copied", "floats", "one", "async", "load"])
def test_dcp_of_one_ranks_part_is_refused(found, how):
    for rank, value in enumerate(found["refused"]):
        assert "Pass qcore.parallel.named_by_rank(state_dict)" in value[how]
        assert f"the part of rank {rank} of 2" in value[how]


@pytest.mark.parametrize("name", [name for name in parallel_state_cases.CASES if name.startswith("by rank")])
def test_dcp_keeps_all_parts_by_rank(found, name):
    for rank, value in enumerate(found[name]):
        assert value["third"]
        assert value["same"]
        assert "Missing key" in value["lost"]
        assert f"dense.gate_proj.weight@{rank}of2" in value["names"]
        assert f"block.mlp.down_proj.weight.data@{rank}of2" in value["names"]
        assert "norm.weight" in value["names"]


def test_a_state_dict_goes_back_to_its_rank(found):
    for rank, value in enumerate(found["per rank"]):
        assert value["types"] == {"Tensor"}
        assert value["kinds"] == {"Tensor", "Parameter"}
        assert value["equal"]
        assert value["assigned"]
        assert value["old"]
        assert f"holds the part of rank {1 - rank} of 2, and this is rank {rank} of 2" in value["neighbour"]
        assert "holds the part of rank" in value["whole"]


def test_a_file_goes_back_to_its_rank(found):
    for value in found["saved"]:
        assert value["equal"]
        assert value["kinds"]
        assert value["listed"] == "no error"


@pytest.mark.parametrize("how", ["again", "state", "neighbour", "convert", "whole"])
def test_a_file_of_one_rank_is_no_model(found, how):
    for rank, value in enumerate(found["saved"]):
        other = rank if how in ("again", "state") else 1 - rank
        assert f"it holds the part of 'rank {other} of 2' of a model" in value[how]
        assert "Load the whole checkpoint, then shard_" in value[how]
