"""Tensor parallel where nothing divides: three gloo ranks against one process."""

from __future__ import annotations

import gloo
import parallel_odd_cases
import pytest

pytestmark = pytest.mark.alternate("three ranks")  # one start of processes
ORDERED = "act-order, sorted and padded on each rank"
SUMS = [
    "uneven heads", "floats", "half of gate and up", "local w8a8", "global gradients", ORDERED,
    *(name for name in parallel_odd_cases.AGAIN if name.startswith(("scheme", "block"))),
]  # fmt: skip
EXPERTS = [name for name in parallel_odd_cases.CASES if name.startswith("experts,")]
BIASES = ["bias of heads", "bias of heads, quantized"]
UNITS = {"groups, 40 features": 16, "groups, 44 features": 16, "groups, 64 features": 16, "groups, 100 features": 32}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    every = gloo.run("parallel_odd_cases", 3, tmp_path_factory.mktemp("three"))
    for name, values in every.items():
        for rank, value in enumerate(values):
            assert not (isinstance(value, str) and value.startswith("raised ")), f"{name}, rank {rank} {value}"
    return every


def error_of(value):
    return value if isinstance(value, float) else value["error"] if "error" in value else value["tp"]


@pytest.mark.parametrize("name", [*SUMS, *EXPERTS, "codes and order", *BIASES])
def test_error_is_that_of_a_sum(found, name):
    errors = [error_of(value) for value in found[name]]
    assert len(errors) == 3
    assert max(errors) < 5e-7


@pytest.mark.parametrize("name", UNITS)
def test_fewer_groups_than_ranks_become_finer(found, name):
    for value in found[name]:
        assert value["error"] < 5e-7
        assert value["units"]["mlp.down_proj"] == value["units"]["mlp.up_proj"] == UNITS[name]


def test_attention_whose_groups_would_be_too_fine_stays_whole(found):
    for value in found["odd heads"]:
        assert value["error"] < 5e-7
        assert sorted(value["units"]) == ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]


def test_heads_may_cut_groups(found):
    for value in found["heads that cut groups"]:
        assert value["error"] < 5e-7
        assert value["units"]["self_attn.o_proj"] == 12


def test_few_experts_are_cut_in_units_of_their_groups(found):
    for value in found["few experts"]:
        assert value["cut"] == ("tensor", 16)
        assert value["error"] < 5e-7


REFUSED = {
    "fine experts": "experts: cannot cut K=51 at 0..17: groups of 32 would become groups of 1",
    "ordered experts": "cut by expert, not by tensor",
    "many experts": "experts: cannot cut 2 experts into 3 shares.\nUse fewer ranks.",
    "global fp8": "Use scales='local', or static activations",
    "global groups": "down: global scales: activations in groups need cuts at whole groups",
    "sums": "down: sum_dtype is torch.int8",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_changes_nothing(found, name):
    for value in found["unchanged"]:
        message, same = value[name]
        assert REFUSED[name] in message
        assert same


def test_a_mesh_of_two_dimensions_is_refused(found):
    for message in found["meshes"]:
        assert message.endswith(
            "a DeviceMesh of 2 dimensions; layers are cut along one.\nPass that one, such as mesh['tp']."
        )


def test_tied_tables_stay_whole(found):
    for value in found["tied"]:
        assert value["error"] < 5e-7
        assert value["whole"]
        assert value["shared"] == "embed"


@pytest.mark.parametrize("name", ["gather", "padded state", "token nan"])
def test_holds_on_every_rank(found, name):
    assert found[name] == [True] * 3


@pytest.mark.parametrize("name", ["gradients", "compiled"])
def test_errors_are_those_of_a_sum(found, name):
    for values in found[name]:
        assert all(value < 1e-6 for value in values.values()), values


def test_embedding_is_the_same(found):
    assert all(value["same"] for value in found["embedding"])


def test_codes_from_global_scales_are_the_same(found):
    assert found["int8 results, global scales"] == [{"codes": 0, "share": 0.0}] * 3


def test_order_is_folded(found):
    assert all(value["error"] < 5e-7 for value in found["folding"])


def test_ranks_with_other_kernels_are_named(found):
    for value in found["disagreeing"]:
        assert value["names"] == ["down", "up"]
        assert len(value["warned"]) == 1
