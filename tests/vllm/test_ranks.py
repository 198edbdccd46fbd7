"""Tensor parallelism: the tokens of any number of ranks are those of one. Nightly: each test starts processes."""

from __future__ import annotations

import pytest
from serving import in_own_process

QCORE = {"quantization": "qcore"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_biases_cut_groups_and_shared_kv_heads(ranks, made):
    folder, expected = made("biases")
    found, log = in_own_process(folder, tensor_parallel_size=ranks, **QCORE)
    assert found == expected, log[-5000:]


@pytest.mark.parametrize("name", ["tied", "mixed", "experts", "gptq"])
def test_two_ranks(name, made):
    folder, expected = made(name)
    found, log = in_own_process(folder, tensor_parallel_size=2, **QCORE)
    assert found == expected, log[-5000:]


def test_scales_do_not_depend_on_the_number_of_ranks(made):
    folder, expected = made("float")
    settings = {"quant_method": "qcore", "scheme": "w4a16-g32-asym@minmax"}
    overrides = {"quantization_config": settings}
    found, log = in_own_process(folder, tensor_parallel_size=2, hf_overrides=overrides, **QCORE)
    assert found == expected, log[-5000:]


def test_two_ranks_of_experts(made):
    folder, expected = made("experts")
    found, log = in_own_process(folder, tensor_parallel_size=2, enable_expert_parallel=True, **QCORE)
    assert found == expected, log[-5000:]


def test_columns_in_an_order_of_their_own_are_refused(made):
    found, log = in_own_process(made("act-order")[0], tensor_parallel_size=2, **QCORE)
    assert found is None
    assert "its columns are sorted by group (act-order)" in log


def test_compiled(made):
    folder, expected = made("biases")
    found, log = in_own_process(folder, enforce_eager=False, **QCORE)
    assert found == expected, log[-5000:]
    assert "AOT compiled function" in log  # saved, or loaded from vLLM's cache
