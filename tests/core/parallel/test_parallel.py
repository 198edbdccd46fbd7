"""Tensor parallel on 2 and 4 gloo ranks against one process: one start of processes for all cases of a size."""

from __future__ import annotations

import re
from pathlib import Path

import gloo
import parallel_cases
import parallel_table
import pytest
import torch
from parallel_table import CODES, ROWS, limit

import qcore
import qcore.parallel
from qcore.parallel.cutting import Share, shares

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "parallel.md"
TABLE = (*ROWS, *CODES)
FEW = (
    *TABLE, "local wfp8afp8-g32", "block with few keys", "block with one key", "experts by expert, uneven",
    "experts by tensor", "experts by plan", "gather", "embedding", "gradients", "token nan",
)  # fmt: skip
"""Cases for 4 ranks in every second run; the rest of them belongs to the grids."""
FOUR = pytest.mark.grid("four ranks")  # one start of processes for all of them, so one turn
FEW_ON_FOUR = pytest.mark.alternate("four ranks")
TWO_ONLY = ("uneven heads", "uncuttable heads")
OTHERS = tuple(name for name in parallel_cases.CASES if name not in (*FEW, *TWO_ONLY))


def _marks(world, name):
    return () if world == 2 else FEW_ON_FOUR if name in FEW else FOUR


def over(*names):
    """Parameters ``world, name``: each case on 2 ranks and on 4, those that are not in FEW in the grids."""
    pairs = [(world, name) for name in names for world in (2, 4) if world == 2 or name not in TWO_ONLY]
    assert {name for _, name in pairs} <= parallel_cases.CASES.keys()
    return pytest.mark.parametrize(
        ("world", "name"),
        [pytest.param(world, name, marks=_marks(world, name), id=f"{name}-{world}") for world, name in pairs],
    )


@pytest.fixture(scope="module")
def of(tmp_path_factory):
    """``of(world, name)``: what each rank found in a case; the first call for a size runs its cases."""
    known = {}

    def found(world, name):
        names = None if world == 2 else FEW if name in FEW else OTHERS
        if (world, names) not in known:
            known[world, names] = gloo.run("parallel_cases", world, tmp_path_factory.mktemp("ranks"), names)
        every = known[world, names][name]
        for rank, value in enumerate(every):
            assert not (isinstance(value, str) and value.startswith("raised ")), f"rank {rank} {value}"
        return every

    return found


def equal_on_all(every):
    assert all(value == every[0] for value in every)
    return every[0]


@over(*ROWS)
def test_equals_one_process(of, world, name):
    found = equal_on_all(of(world, name))
    assert found["tp"] <= limit(name)
    if "one" in found:  # no further from exact arithmetic than one process, but for roundings of bfloat16
        assert found["exact"] <= found["one"] * (1 + world**0.5 / 2) + 1e-7


@over("act-order, sorted and padded on each rank")
def test_padding_of_sorted_columns_is_limited(of, world, name):
    assert 1 < of(world, name)[0]["wider"] < 1.6


@over("int8 results, local scales")
def test_codes_from_local_scales_are_one_apart_at_most(of, world, name):
    found = equal_on_all(of(world, name))
    assert found["codes"] <= 1
    assert found["share"] < 0.2


@over("int8 results, global scales")
def test_codes_from_global_scales_are_the_same(of, world, name):
    assert equal_on_all(of(world, name)) == {"codes": 0, "share": 0.0}


@over(*(name for name in parallel_cases.CASES if name.startswith("scheme ")))
def test_every_kind_of_weight_is_cut(of, world, name):
    local = name == "scheme w4a8-g32-asym-aasym"
    assert equal_on_all(of(world, name)) < (2e-2 if local else 5e-7)


@over(*(name for name in parallel_cases.CASES if name.startswith("local ")))
def test_local_scales_are_those_of_each_cut(of, world, name):
    assert equal_on_all(of(world, name)) < 5e-7


@over("block", "block fused", "block with few keys", "block with one key")
def test_default_plan_cuts_a_block(of, world, name):
    kv = {"block with few keys": 2, "block with one key": 1}.get(name, 4)
    for found in of(world, name):
        assert found["error"] < 5e-7
        assert found["heads"] == (8 // world, max(1, kv // world))
        assert list(found["cuts"].values()) == ["column", "column", "column", "row", "column", "column", "row"]
        assert found["kernels"] == 7
        assert found["siblings"] == (5 if name in ("block fused", "block with few keys") else 0)


@over("block")
def test_each_rank_holds_its_part(of, world, name):
    model = parallel_cases.quantized(parallel_cases.Block(), "w4a16-g32-asym")
    whole = qcore.report(model).bytes_after
    held = [found["bytes"] for found in of(world, name)]
    assert sum(held) == pytest.approx(whole, rel=0.02)


@over("uneven heads")
def test_a_key_stays_with_its_queries(of, world, name):
    found = of(world, name)
    assert [value["heads"] for value in found] == [6, 3]
    assert all(value["error"] < 5e-7 for value in found)


@over("uncuttable heads")
def test_attention_that_cannot_be_cut_stays_whole(of, world, name):
    assert equal_on_all(of(world, name)) == ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]


@over(*(name for name in parallel_cases.CASES if name.startswith("experts by ") and name[11:15] in ("expe", "tens")))
def test_experts_are_cut(of, world, name):
    assert equal_on_all(of(world, name)) < 5e-7


@over("experts by projections")
def test_experts_are_cut_by_their_projections(of, world, name):
    found = equal_on_all(of(world, name))
    assert found["kinds"] == {"experts": "tensor"}
    assert "by row after it" in found["half"]


@over("experts by plan")
def test_few_experts_are_cut_by_tensor(of, world, name):
    assert equal_on_all(of(world, name)) == ("expert" if world == 2 else "tensor")


@over("embedding")
def test_embedding_is_the_same(of, world, name):
    found = equal_on_all(of(world, name))
    assert found["same"]
    assert "but the table has 50 rows" in found["outside"]


@over("gather")
def test_logits_are_gathered(of, world, name):
    assert equal_on_all(of(world, name)) is True


@over("floats", "half of gate and up", "global gradients", "compiled gradient")
def test_error_is_that_of_a_sum(of, world, name):
    assert all(value < 5e-7 for value in of(world, name))


@over("gradients", "compiled", "compiled, global scales")
def test_errors_are_those_of_a_sum(of, world, name):
    for found in of(world, name):
        assert all(value < 1e-6 for value in found.values()), found


@over("states")
def test_state_is_the_part_of_the_rank(of, world, name):
    share = 192 // world
    shapes = {"up.bias": (share,), "up.weight.data": (share, 48), "up.weight.scale": (3, share), "down.bias": (96,)}
    shapes |= {"down.weight.data": (96, share // 2), "down.weight.scale": (share // (32 if world == 2 else 16), 96)}
    for found in of(world, name):
        assert found["shapes"] == shapes
        assert found["error"] < 5e-7
        assert found["copy"]


@over("padded state", "token nan", "making")
def test_holds_on_every_rank(of, world, name):
    assert of(world, name) == [True] * world


@over("folding")
def test_order_is_folded(of, world, name):
    found = equal_on_all(of(world, name))
    assert found["error"] < 5e-7
    assert "cannot fold an order of 96 features into a Linear of 95" in found["other"]


@over("outputs")
def test_results_have_the_dtypes_of_one_process(of, world, name):
    found = equal_on_all(of(world, name))
    assert found["fixed"] is torch.float32
    assert found["auto"] is torch.bfloat16
    assert found["empty"] == (0, 3, 96)
    assert found["shape"] == (2, 3, 96)
    assert "its last dimension must be in_features" in found["wrong"]


@over("own reduction")
def test_sum_can_be_replaced(of, world, name):
    found = equal_on_all(of(world, name))
    assert found["error"] < 5e-7
    assert found["calls"] == [(3, 96)]


@over("overlapping")
def test_halves_of_many_rows_overlap(of, world, name):
    found = equal_on_all(of(world, name))
    assert found["error"] < 5e-7  # several ranks are summed in an order that depends on the place of a row
    assert found["rows"] == [1280, 1033, 3]


@over("disagreeing")
def test_ranks_with_other_kernels_are_named(of, world, name):
    found = equal_on_all(of(world, name))
    assert found["alike"] == ({}, 0)
    assert found["names"] == ["down", "up"]
    (text,) = found["warned"]
    assert "the ranks run different kernels" in text
    for layer in found["names"]:  # which kernels they are depends on the processor
        first, second = re.search(rf"^{layer}: (\S+) \(.*?\), (\S+) \(", text, re.MULTILINE).groups()
        assert first != second


REFUSED = {
    "group": "groups of 32 would become groups of 1",
    "few": "input features into",
    "twice": "is cut already",
    "again": "is cut already",
    "tied": "shares its weight with another one",
    "conv": "a Conv2d cannot be cut",
    "kind": "a cut is 'diagonal'",
    "unit": "must be positive",
    "experts": "by 'expert' or 'tensor', not 'row'",
    "nothing": "give shard_ a plan",
    "plan": "it maps patterns of names to cuts",
    "scales": "must be 'local' or 'global'",
    "fp8": "Use scales='local', or static activations",
    "dtype": "sum_dtype is torch.int8",
    "float": "a Linear is no QuantizedLinear",
    "parts": "33 output features are not 2 equal parts",
    "typo": "Did you mean 'down'?",
}


@over("refusals")
def test_what_cannot_be_cut_is_refused(of, world, name):
    found = equal_on_all(of(world, name))
    assert found.keys() == REFUSED.keys()
    for key, text in REFUSED.items():
        assert text in found[key], key


@over("pickling")
def test_layer_of_a_group_of_its_own_is_not_pickled(of, world, name):
    assert "cannot be pickled" in equal_on_all(of(world, name))


@FEW_ON_FOUR
def test_table_on_the_page_is_what_is_measured(of):
    """The rows of the page are the cases, and its figures are these up to noise."""
    wanted = parallel_table.table({world: {name: of(world, name)[0] for name in TABLE} for world in (2, 4)})
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    on_page = lines[lines.index(wanted[0]) :][: len(wanted)]  # without the line of dashes
    assert [line.split(" | ")[0] for line in on_page] == [line.split(" | ")[0] for line in wanted]
    for shown, measured in zip(on_page, wanted, strict=True):
        pairs = [
            [float(text) for text in re.findall(r"\d[\d.]*(?:e-\d+)?", line.partition(" | ")[2])]
            for line in (shown, measured)
        ]
        assert len(pairs[0]) == len(pairs[1])
        for old, new in zip(*pairs, strict=True):
            # Sums of float32 differ from machine to machine; quantization does not.
            assert old == pytest.approx(new, rel=0.25, abs=3e-4 if new < 1e-3 else 0), (shown, measured)


def test_no_process_group_is_an_error():
    with pytest.raises(qcore.UnsupportedError, match="init_process_group"):
        qcore.parallel.shard_(torch.nn.Sequential(torch.nn.Linear(8, 8)))


def test_shares_cover_everything_in_whole_units():
    for total, size, unit in [(10, 3, 1), (688, 2, 128), (688, 4, 128), (64, 4, 16), (33, 2, 16)]:
        found = shares(total, size, unit)
        assert [share.start for share in found] == [0, *(share.stop for share in found[:-1])]
        assert found[-1].stop == total
        assert all(share.start % unit == 0 and share.length > 0 for share in found)
    assert shares(64, 4, 32, replicate=True) == [
        Share(0, 32, 64),
        Share(0, 32, 64),
        Share(32, 32, 64),
        Share(32, 32, 64),
    ]
    with pytest.raises(qcore.UnsupportedError, match="into 4 shares"):
        shares(64, 4, 32)
