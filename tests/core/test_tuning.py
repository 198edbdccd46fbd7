from __future__ import annotations

import json
import time

import pytest
import torch

import qcore
from qcore.discovery.registry import registry
from qcore.resolving import offers, resolver, tuning
from qcore.runtime import disk_cache


def pairs(request, *names):
    found = [(status, offer.kernel) for status, offer in offers.offers_for(request)]
    return [pair for pair in found if pair[1].name in names]


@pytest.fixture
def slow_and_fast(add_plugin, stub):
    class Slow(stub):
        def __call__(self, x, packed, bias, **given):
            time.sleep(0.002)
            return super().__call__(x, packed, bias, **given)

    add_plugin("slow", linear=lambda request: qcore.Offer(Slow("slow.k", request), qcore.NATIVE + 5))
    add_plugin("fast", linear=lambda request: qcore.Offer(stub("fast.k", request), qcore.NATIVE))


def test_measured_times_are_stored_and_decide(slow_and_fast, request_of):
    request = request_of()
    assert qcore.resolve(request).plugin == "slow"
    found = tuning.measure(request, pairs(request, "slow.k", "fast.k"), rows=(1, 4), seconds=0.01)
    assert {m.kernel: m.stored for m in found} == {"slow.k": True, "fast.k": True}
    assert all(set(m.milliseconds) == {1, 4} for m in found)
    resolver.forget()
    decision = qcore.resolve(request)
    assert decision.plugin == "fast"
    assert "fast.k measured faster" in str(decision)
    tuning._known.clear()  # as in another process
    resolver.forget()
    assert qcore.resolve(request).plugin == "fast"
    assert qcore.resolve(request_of(n=32)).plugin == "slow"  # measured at one size only


def test_a_fallback_that_measured_faster_serves_before_a_plugin(slow_and_fast, request_of):
    request = request_of()
    everything = [(status, offer.kernel) for status, offer in offers.offers_for(request)]
    slow = [pair for pair in everything if pair[1].name != "fast.k"]
    tuning.measure(request, slow, rows=(1, 4), seconds=0.01)
    resolver.forget()
    decision = qcore.resolve(request, disable="fast")
    assert decision.plugin == "torch"
    assert "measured faster than slow.k, which ranks higher" in str(decision)
    assert qcore.resolve(request).plugin == "fast", "not measured: its rank stands"
    assert qcore.resolve(request, backends="slow", disable="fast").plugin == "slow"


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8-g32-token-o8t", "w8a8-static-o8"])
def test_any_linear_scheme_can_be_measured(request_of, scheme):
    from dataclasses import replace

    request = replace(request_of(scheme), bias=True)
    found = tuning.measure(request, [(s, o.kernel) for s, o in offers.offers_for(request)], rows=(2,), seconds=0.001)
    assert found
    assert all(m.milliseconds[2] > 0 for m in found)


def _known(request, times):
    status, kernel = next((s, o.kernel) for s, o in offers.offers_for(request))
    key = tuning._key(request, status, kernel)
    assert disk_cache.write("tuning", key, milliseconds=times)
    tuning._known.clear()
    return status, kernel


def test_the_nearest_row_count_or_the_mean_decides(request_of):
    status, kernel = _known(request_of(), {"1": 1.0, "16": 4.0, "256": 16.0})
    figures = {rows: tuning.measured(request_of(rows=rows), status, kernel) for rows in (1, 9, 10, 1000, None)}
    assert figures == {1: 1.0, 9: 4.0, 10: 4.0, 1000: 16.0, None: pytest.approx(4.0)}


@pytest.mark.parametrize("times", [None, [], "x", {"a": 1.0}, {"1": "fast"}, {"1": 0.0}, {"1": -1.0}, {"1": None}, {}])
def test_damaged_records_count_as_not_measured(request_of, times):
    status, kernel = _known(request_of(), times)
    assert tuning.measured(request_of(), status, kernel) is None


def test_a_record_without_figures_counts_as_not_measured(request_of):
    status, kernel = _known(request_of(), {"1": 1.0})
    key = tuning._key(request_of(), status, kernel)
    disk_cache._path("tuning", key).write_text(json.dumps({"key": key}))
    tuning._known.clear()
    assert tuning.measured(request_of(), status, kernel) is None


def test_other_contracts_are_not_measured(request_of):
    request = request_of("w8a16", contract="embedding")
    status = registry.status("torch")
    assert tuning.measured(request, status, offers.kernels_of("torch")(request)[0]) is None


def test_figures_that_cannot_be_stored_still_count_here(request_of, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QCORE_CACHE_DIR", str(tmp_path / "file"))
    request = request_of()
    (found, *_) = tuning.measure(request, [(s, o.kernel) for s, o in offers.offers_for(request)], (1,), 0.001)
    assert not found.stored
    assert offers.offers_for(request)
    assert tuning.measured(request, registry.status("torch"), offers.offers_for(request)[0][1].kernel) is not None


def test_calls_take_turns():
    order = []
    tuning.interleaved_medians([lambda: order.append("a"), lambda: order.append("b")], torch.device("cpu"), 0.0)
    rounds = [order[i : i + 2] for i in range(0, len(order), 2)]
    assert len(rounds) == 6
    assert all(sorted(calls) == ["a", "b"] for calls in rounds), "each once a round, in whatever order"
    assert tuning.interleaved_medians([], torch.device("cpu")) == []


def test_what_was_measured_slower_than_the_fallback_is_listed(slow_and_fast, request_of, add_plugin):
    request = request_of()
    pairs_of_all = [(status, offer.kernel) for status, offer in offers.offers_for(request)]
    tuning.measure(request, pairs_of_all, rows=(1, 4), seconds=0.01)
    found = {slow.kernel: slow for slow in tuning.slower_than_fallback(qcore.plugins())}
    assert found["slow.k"].plugin == "slow"
    assert found["slow.k"].milliseconds > found["slow.k"].fallback_milliseconds
    assert found["slow.k"].fallback.startswith("torch.")
    assert "n=16 k=64" in found["slow.k"].request
    assert not any(name.startswith("torch.") for name in found)
    add_plugin("slow", "another version", linear=lambda request: qcore.Refusal("mended"))
    assert "slow.k" not in {slow.kernel for slow in tuning.slower_than_fallback(qcore.plugins())}


@pytest.mark.parametrize("about", [{}, {"request": 5, "plugin": "slow", "kernel": "slow.k"}])
def test_records_that_do_not_name_their_subject_are_not_listed(about):
    assert disk_cache.write("tuning", "some key", milliseconds={"1": 1.0}, **about)
    assert tuning.slower_than_fallback(qcore.plugins()) == []
