"""The hint that another dtype of x would be faster: in `explain` and in reports, with a figure that was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import qcore
from qcore.discovery.kernels import FALLBACK, Offer, Refusal
from qcore.resolving import hints, tuning


@pytest.fixture
def fast_bfloat16(add_plugin, stub):
    """A plugin that serves an x of bfloat16 only."""
    made = {}

    def linear(request):
        if request.x_dtype != torch.bfloat16:
            return Refusal("bfloat16 only")
        return made.setdefault(request, Offer(stub("mine.fast", request)))

    add_plugin("mine", linear=linear)


def explained(dtype, **more):
    return qcore.explain("w4a16-g32", n=16, k=64, dtype=dtype, **more).hints


def test_a_dtype_that_a_faster_kernel_serves_is_named(fast_bfloat16):
    for dtype, name in ((torch.float32, "float32"), (torch.float16, "float16")):
        (hint,) = explained(dtype)
        assert hint.startswith(
            f"only plain torch ops support an x of {name} here; use bfloat16, which mine.fast supports"
        )
        assert hint.endswith("'qcore tune' measures how much faster it is.")  # nobody did: no figure is made up
    assert explained(torch.bfloat16) == ()
    assert not any("mine.fast" in hint for hint in explained(torch.float32, disable="mine"))


def _measured(times, monkeypatch):
    def measured(request, status, kernel):
        return times.get((kernel.name, request.x_dtype))

    monkeypatch.setattr(tuning, "measured", measured)


def test_measured_times_give_the_figure(fast_bfloat16, monkeypatch):
    _measured({("torch.plain.linear", torch.float32): 6.0, ("mine.fast", torch.bfloat16): 2.0}, monkeypatch)
    (hint,) = explained(torch.float32)
    assert hint.endswith("use bfloat16, which mine.fast supports: about 3 times as fast as measured on this machine.")


def test_a_kernel_that_was_measured_slower_is_not_advised(fast_bfloat16, monkeypatch):
    _measured({("torch.plain.linear", torch.float32): 2.0, ("mine.fast", torch.bfloat16): 1.9}, monkeypatch)
    assert explained(torch.float32) == ()


def test_a_report_says_it_once_for_all_layers(fast_bfloat16):
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.Embedding(8, 16))
    made = qcore.quantize_(model, "w4a16-g16")
    assert made.hints == qcore.report(model).hints
    assert str(made).count("hint: ") == 1
    assert "use bfloat16, which mine.fast supports" in made["0"].hint
    assert made["3"].hint == ""
    model.to(torch.bfloat16)
    assert qcore.report(model).hints == ()


def test_a_layer_is_told_under_its_own_settings(fast_bfloat16):
    with qcore.using(disable="mine"):
        model = nn.Sequential(nn.Linear(64, 16))
        qcore.quantize_(model, "w8a16")
    assert not any("mine.fast" in hint for hint in qcore.report(model).hints)


def test_each_figure_stands_where_it_is_said_to_stand():
    root = Path(__file__).parents[2]
    for (slow, _, fast, _), (times, where) in hints._MEASURED.items():
        text = (root / where.partition("(")[2].rstrip(")")).read_text(encoding="utf-8")
        rows = [line.split("|") for line in text.splitlines() if line.startswith("| w4a16-g128 |")]
        own = {name: float(next(row[3] for row in rows if row[2].strip() == name)) for name in (slow, fast)}
        assert round(own[slow] / own[fast]) == times


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8-g32"])
def test_a_scheme_with_a_kernel_for_every_dtype_gives_no_hint(scheme):
    assert not any(
        "plain torch ops support" in hint for hint in qcore.explain(scheme, n=16, k=64, dtype=torch.float32).hints
    )


def test_explain_of_ever_new_sizes_holds_on_to_little(monkeypatch, add_plugin, stub):
    from qcore.resolving import resolver, verification

    monkeypatch.setattr(resolver, "CACHE_LIMIT", 8)
    monkeypatch.setattr(tuning, "_MAX_KNOWN", 8)
    monkeypatch.setattr(verification, "_MAX_SIZES", 8)
    add_plugin("mine", linear=lambda request: Offer(stub("mine.kernel", request), FALLBACK - 1))
    for n in range(1, 30):
        qcore.explain("w8a16", n=n, k=64)
    assert len(resolver._decisions) <= 8
    assert len(tuning._known) <= 8 + 2
    assert len(verification._seen) <= 8


def test_a_weight_under_ever_new_scales_keeps_the_last_kernels():
    from qcore.functional import calls

    weight, x = qcore.quantize(torch.randn(16, 64), "int8"), torch.randn(2, 64)
    for step in range(calls._MAX_BOUNDS + 9):
        qcore.linear(x, weight, activation=qcore.StaticInt8(0.01 + step * 1e-4))
    assert len(calls.entry_for(weight)._bounds) == calls._MAX_BOUNDS
