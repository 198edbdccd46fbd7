from __future__ import annotations

import json

import pytest
import torch

import qcore
from qcore.discovery.kernels import EMULATED, FALLBACK, NATIVE, OFFLOAD
from qcore.resolving.decision import Candidate, Decision, Stage, describe, format_table


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (None, ""),
        (NATIVE, "NATIVE"),
        (NATIVE + 5, "NATIVE+5"),
        (OFFLOAD - 3, "OFFLOAD-3"),
        (int(FALLBACK), "FALLBACK"),
        (EMULATED - 600, "EMULATED-600"),
        (9000, "NATIVE+6000"),
    ],
)
def test_ranks_as_people_read_them(rank, text):
    assert Candidate("p", "k", "selected", "", rank).rank_text == text


def test_stages_are_words():
    assert f"{Stage.FAILED_VERIFICATION}" == "failed verification"


def test_requests_in_one_line(request_of):
    text = describe(request_of("w4a8-g32-asym-aasym", n=16, k=64, dtype=torch.bfloat16))
    assert text.startswith("linear int4-g32-asym/plain n=16 k=64 x=bfloat16")
    assert text.endswith("on cpu")
    assert "DynamicInt8(symmetric=False)" in text
    assert describe(request_of("w8a16", contract="embedding")) == "embedding int8/plain n=16 k=64 x=float32 on cpu"
    assert describe(request_of("w8a8-static-o8", contract="conv2d")).count("Int8(scale=1.0") == 2


def test_training_is_said(request_of):
    from dataclasses import replace

    assert " training " in describe(replace(request_of(), training=True))


def test_tables_align_and_do_not_pad_the_last_column():
    assert format_table(("a", "b"), [("long", "x"), ("s", "")]) == ["a     b", "long  x", "s"]


@pytest.fixture
def decision(request_of):
    rows = (
        Candidate("good", "good.kernel", "selected", "note", int(NATIVE), 1.23456, "dist", "1.0"),
        Candidate("torch", "torch.plain", "outranked", "", int(FALLBACK), None, "qcore", "2.0"),
        Candidate("gone", "", "unavailable", "no device"),
    )
    kernel = qcore.resolve(request_of()).kernel
    return Decision(request_of(), rows, kernel, ("something",))


def test_the_table(decision):
    lines = str(decision).splitlines()
    assert lines[0] == "linear int4-g32/plain n=16 k=64 x=float32 on cpu: good.kernel (dist 1.0)"
    assert lines[1].split() == ["plugin", "kernel", "stage", "rank", "why"]
    assert lines[2].endswith("note [1.23 ms measured]")
    assert lines[4].endswith("no device")
    assert lines[-1] == "hint: something"


def test_selected_and_plugin(decision):
    assert decision.selected is decision.candidates[0]
    assert (decision.plugin, decision.is_fallback) == ("good", False)


def test_nobody(request_of):
    nobody = Decision(request_of(), (), None)
    assert nobody.selected is None
    assert (nobody.plugin, nobody.is_fallback) == ("", False)
    assert "no kernel supports this request" in str(nobody)
    assert nobody.to_json()["plugin"] is None


def test_json_is_plain(decision):
    found = json.loads(json.dumps(decision.to_json()))
    assert found["plugin"] == "good"
    assert found["fallback"] is False
    assert found["candidates"][0]["rank_text"] == "NATIVE"
    assert found["hints"] == ["something"]
