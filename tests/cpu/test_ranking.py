"""Ranks from measurements: which measured layer decides, and what happens where the built-in kernels were faster."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import qcore
from qcore_cpu import native, ranking
from qcore_cpu.ranking import Cell

ISAS = ("amxint8", "avx512bf16", "avx512vnni", "avxvnni", "avx2", "generic", "neoni8mm", "neondot", "neon")
TABLES = sorted(path.stem for path in (Path(ranking.__file__).parent / "tables").glob("*.json"))


def cell(scheme="w4a16-g128", n=1024, k=1024, *, threads=1, ratios=(2.0,), against="torch.cpu.w4a16", x="bf16"):
    return Cell("linear", x, scheme, n, k, threads, against, ratios)


def request(scheme="w4a16-g128", n=1024, k=1024, dtype=torch.bfloat16):
    parsed = qcore.Scheme.parse(scheme)
    sizes = (n, k, None, parsed.weight, parsed.activation, parsed.output)
    return qcore.LinearRequest(torch.device("cpu"), dtype, dtype, *sizes, False, False)


@pytest.mark.parametrize(
    ("wanted", "measured", "chosen"),
    [
        (request("w4a16-g64"), [cell("w4a16-g32"), cell("w4a16-g128"), cell("w4a16")], "w4a16-g32"),
        (request("w4a16-g256"), [cell("w4a16-g32"), cell("w4a16-g128"), cell("w4a16")], "w4a16-g128"),
        (request("w4a16"), [cell("w4a16-g128"), cell("w4a16", n=64, k=64)], "w4a16"),
        (request("w4a16-g32"), [cell("w4a16-g32-asym"), cell("w4a16-g128")], "w4a16-g128"),
        (request("w8a8"), [cell("w8a16"), cell("w8a8-aasym"), cell("w8a8")], "w8a8"),
        (request("w8a8-static(0.5,0)"), [cell("w8a8"), cell("w8a8-static(0.02,0)")], "w8a8-static(0.02,0)"),
        (request("w8a16"), [cell("w4a16"), cell("w8a16", x="fp32")], None),
        (request("w8a16", dtype=torch.float16), [cell("w8a16")], None),
    ],
)
def test_the_nearest_scheme_decides(wanted, measured, chosen):
    found = ranking.nearest(wanted, 1, measured)
    assert (found.scheme if found else None) == chosen


@pytest.mark.parametrize(
    ("n", "k", "expected"), [(512, 512, 256), (8192, 8192, 4096), (4096, 64, 256), (256, 65536, 4096)]
)
def test_the_nearest_size_decides(n, k, expected):
    found = ranking.nearest(request(n=n, k=k), 1, [cell(n=256, k=1024), cell(n=4096, k=4096)])
    assert found.n == expected


@pytest.mark.parametrize(("threads", "expected"), [(1, 1), (3, 1), (8, 16), (64, 16)])
def test_threads_come_before_sizes(threads, expected):
    measured = [cell(threads=1), cell(threads=16, n=64, k=64)]
    assert ranking.nearest(request(), threads, measured).threads == expected


def test_the_mean_over_rows_is_geometric():
    assert math.isclose(cell(ratios=(0.5, 2.0)).mean, 1.0)


@pytest.mark.parametrize(("against", "above"), [("torch.cpu.w4a16", 1000), ("torch.plain.linear", 990)])
def test_slower_layers_rank_below_what_was_faster(monkeypatch, against, above):
    monkeypatch.setattr(ranking, "cells", lambda _isa: (cell(ratios=(0.7, 0.9), against=against),))
    rank, why = ranking.rank(request(), "avx2", 1)
    assert above < rank < above + 10  # plain torch ops rank 1000, the other built-in kernels 1010 to 1020
    assert why == f"measured 0.79 times as fast as {against} with avx2"
    monkeypatch.setattr(ranking, "cells", lambda _isa: (cell(ratios=(0.9, 1.3), against=against),))
    assert ranking.rank(request(), "avx2", 1) == (qcore.NATIVE, "")
    assert ranking.rank(request("w8a16"), "avx2", 1) == (qcore.NATIVE, "")


def test_an_instruction_set_without_a_table_serves():
    assert ranking.cells("generic") == ()
    assert ranking.rank(request(), "generic", 4) == (qcore.NATIVE, "")


@pytest.mark.parametrize("isa", TABLES)
def test_each_table_can_be_read_and_decides_its_own_cells(isa):
    assert isa in ISAS
    assert ranking.cells(isa)
    for one in ranking.cells(isa):
        assert all(0 < ratio < 1000 for ratio in one.ratios)
        if one.contract != "linear":
            continue
        wanted = request(one.scheme, one.n, one.k, {"bf16": torch.bfloat16, "fp32": torch.float32}[one.x])
        assert ranking.nearest(wanted, one.threads, ranking.cells(isa)) == one
        assert (ranking.rank(wanted, isa, one.threads)[0] == qcore.NATIVE) == (one.mean >= 1)


def test_a_layer_takes_the_built_in_kernel_that_was_faster(monkeypatch):
    linear = torch.nn.Linear(72, 72, bias=False)
    with qcore.using("torch"):
        built_in = qcore.nn.QuantizedLinear.from_float(linear, "w8a8").decision.kernel.name  # not the same everywhere
    slow = cell("w8a8", 64, 64, ratios=(0.5,), against=built_in, x="fp32")
    monkeypatch.setattr(ranking, "cells", lambda _isa: (slow,))
    layer = qcore.nn.QuantizedLinear.from_float(linear, "w8a8")
    assert layer.decision.kernel.name == built_in
    assert f"measured 0.50 times as fast as {built_in} with {native.isa()}" in " ".join(str(layer.decision).split())
    assert qcore.nn.QuantizedLinear.from_float(linear, "w4a16-g8").decision.kernel.name == "cpu.linear"
