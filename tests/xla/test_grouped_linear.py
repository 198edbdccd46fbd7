"""Mixtures of experts as a layer: against the contract, on request, compiled, and what is wrong with a call."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from grids import sampled

import qcore
from qcore import Scheme
from qcore.contracts import GROUPED_LINEAR
from qcore.contracts.grouped import _problem, _Shape
from qcore.contracts.inputs import Draw
from qcore.resolving.verification import difference
from qcore_xla import calls, plugin

CPU = torch.device("cpu")
ROWS = {"few": (1, 0, 3), "many": (9, 0, 20), "none": (0, 0, 0), "behind": (2, 3, 0)}
SCHEMES = ("w4a16-g32-asym", "w8a8-aasym", "w4a8-g32-static", "wfp8a16", "nvfp4", "wfp4a16-g16-e4m3d", "wfp8afp8-g32")


def problem(scheme, rows, n=20, k=77, bias=True, dtype=torch.float32, behind=0):
    draw = Draw(torch.Generator().manual_seed(0))
    request = GROUPED_LINEAR.request_for(draw.fill(Scheme.parse(scheme)), CPU, dtype, n, k)
    request = replace(request, experts=len(rows), bias=bias)
    return _problem(draw, request, _Shape("here", rows, n, k, bias, behind))


def kernel_of(here):
    offer = plugin.qcore_grouped_linear(here.request)
    assert isinstance(offer, qcore.Offer), offer
    return offer.kernel


@pytest.mark.parametrize(("scheme", "rows"), sampled(itertools.product(SCHEMES, ROWS), 12))
def test_rows_of_experts(scheme, rows):
    here = problem(scheme, ROWS[rows], behind=2 if rows == "behind" else 0)
    kernel = kernel_of(here)
    packed = kernel.pack(here.weight)
    assert not difference(kernel.unpack(packed), here.weight)
    verdict = GROUPED_LINEAR.judge(here, kernel(here.x, packed, here.bias, **here.given))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("scheme", ["w8a8-aasym", "nvfp4"])
def test_long_inputs_are_cut(monkeypatch, scheme):
    here = problem(scheme, (5, 0, 9), behind=1)
    kernel = kernel_of(here)
    monkeypatch.setattr(calls, "MOST_ROWS", 4)
    assert GROUPED_LINEAR.judge(here, kernel(here.x, kernel.pack(here.weight), here.bias, **here.given)).ok


def test_wrong_calls():
    here = problem("w4a16-g32", (2, 3))
    kernel = kernel_of(here)
    packed, given = kernel.pack(here.weight), here.given
    for x in (here.x[0], here.x[:, :-1], here.x[None]):
        with pytest.raises(qcore.FormatError, match="K=77"):
            kernel(x, packed, None, **given)
    with pytest.raises(qcore.FormatError, match=r"bias has shape \(20,\)"):
        kernel(here.x, packed, here.bias[0], **given)
    for offsets in ([3, 2], [2, 6], [-1, 5]):
        with pytest.raises(qcore.FormatError, match="ascend"):
            kernel(here.x, packed, None, offsets=torch.tensor(offsets, dtype=torch.int32))
    with pytest.raises(qcore.FormatError, match="int32"):
        kernel(here.x, packed, None, offsets=torch.tensor([2, 5]))
    one = GROUPED_LINEAR.request_for(Scheme.parse("w4a16-g32"), CPU, torch.float32, 20, 77)
    with pytest.raises(qcore.FormatError, match="was made for"):
        plugin.qcore_grouped_linear(one).kernel.pack(here.weight)


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scheme", ["mxfp4", "w8a8"])
def test_a_layer(scheme, compiled):
    torch.manual_seed(0)
    dense, bias = torch.randn(3, 8, 40), torch.randn(3, 8)
    with qcore.using("xla", strict=True):
        layer = qcore.nn.QuantizedGroupedLinear.from_float(dense, scheme, bias=bias)
    with qcore.using("torch"):
        other = qcore.nn.QuantizedGroupedLinear.from_float(dense, scheme, bias=bias)
    x, ends = torch.randn(7, 40), torch.tensor([2, 2, 6], dtype=torch.int32)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    torch.testing.assert_close(call(x, ends), other(x, ends), rtol=1e-4, atol=1e-4)
    assert layer.decision.kernel.name == f"xla.grouped_w{'fp4a16' if scheme == 'mxfp4' else '8a8'}"


def test_only_on_request():
    layer = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(3, 8, 40), "mxfp4")
    layer(torch.randn(4, 40), torch.tensor([1, 2, 4], dtype=torch.int32))
    (row,) = [c for c in layer.decision.candidates if c.plugin == "xla"]
    assert (layer.decision.plugin, row.stage) != ("xla", "selected")
    assert row.stage == "outranked"
