from __future__ import annotations

import threading

import pytest
import torch

import qcore
from qcore.discovery.kernels import EMULATED, FALLBACK, NATIVE, OFFLOAD, Offer, Refusal
from qcore.discovery.registry import registry
from qcore.errors import PluginError, QcoreWarning, UnsupportedError
from qcore.resolving import offers, resolver, tuning


def stages(decision):
    return {c.plugin: c.stage for c in decision.candidates}


def test_the_fallback_serves_where_nothing_else_is(request_of):
    decision = qcore.resolve(request_of())
    assert decision.is_fallback
    assert decision.kernel.name == decision.selected.kernel


def test_the_higher_rank_serves(add_kernel, request_of):
    add_kernel("b-native", NATIVE, note="fast")
    add_kernel("a-offload", OFFLOAD, note="copies")
    decision = qcore.resolve(request_of())
    assert decision.plugin == "b-native"
    assert stages(decision)["a-offload"] == "outranked"
    reasons = {c.plugin: c.reason for c in decision.candidates}
    assert reasons["a-offload"] == "b-native.stub ranks higher; copies"
    assert reasons["b-native"] == "fast"


def test_fine_ranks_decide_inside_a_tier(add_kernel, request_of):
    add_kernel("a", NATIVE)
    add_kernel("b", NATIVE + 5)
    add_kernel("c", NATIVE - 5)
    decision = qcore.resolve(request_of())
    assert [c.plugin for c in decision.candidates][:4] == ["b", "a", "c", "torch"]
    assert decision.hints == ()


def test_an_emulated_device_is_below_the_fallback_unless_named(add_kernel, request_of):
    add_kernel("soft", EMULATED)
    assert qcore.resolve(request_of()).plugin == "torch"
    assert qcore.resolve(request_of(), backends="soft").plugin == "soft"


def test_the_users_order_beats_rank(add_kernel, request_of):
    add_kernel("fast", NATIVE)
    add_kernel("slow", FALLBACK - 50)
    decision = qcore.resolve(request_of(), backends="slow,torch")
    order = list(dict.fromkeys(c.plugin for c in decision.candidates))
    assert order == ["slow", "torch", "fast"]
    reason = next(c.reason for c in decision.candidates if c.plugin == "fast")
    assert reason == "slow comes first in your order"


def test_orders_by_contract(add_kernel, request_of):
    add_kernel("fast", NATIVE)
    wanted = {"backends": "linear=torch"}
    assert qcore.resolve(request_of(), **wanted).plugin == "torch"
    assert qcore.resolve(request_of("w8a16", contract="embedding"), **wanted).plugin == "fast"


def test_a_disabled_plugin_is_not_asked(add_plugin, request_of):
    add_plugin("mine", linear=lambda request: pytest.fail("asked"))
    decision = qcore.resolve(request_of(), disable="mine")
    assert stages(decision)["mine"] == "blocked"


def test_ties_are_told_and_the_name_decides(add_kernel, request_of):
    add_kernel("b", NATIVE)
    add_kernel("a", NATIVE)
    decision = qcore.resolve(request_of())
    assert decision.plugin == "a"
    assert decision.hints == (
        "a and b have the same rank; the first name is selected. Set QCORE_BACKENDS, or run 'qcore tune'.",
    )


def test_an_order_leaves_no_tie(add_kernel, request_of):
    add_kernel("b", NATIVE)
    add_kernel("a", NATIVE)
    assert qcore.resolve(request_of(), backends="b").hints == ()
    assert qcore.resolve(request_of(), backends="b").plugin == "b"


@pytest.fixture
def timed(monkeypatch):
    """``timed({"a.stub": 2.0})``: milliseconds by kernel, as if ``qcore tune`` had measured them."""

    def set_times(times):
        monkeypatch.setattr(tuning, "measured", lambda request, status, kernel: times.get(kernel.name))

    return set_times


def reason_of(decision, plugin):
    return next(c.reason for c in decision.candidates if c.plugin == plugin)


def test_measured_times_decide_inside_a_tier(add_kernel, request_of, timed):
    for name, rank in (("a", NATIVE + 5), ("b", NATIVE)):
        add_kernel(name, rank)
    timed({"a.stub": 2.0, "b.stub": 1.0})
    decision = qcore.resolve(request_of())
    assert decision.plugin == "b"
    assert reason_of(decision, "a") == "b.stub measured faster"
    assert "[1 ms measured]" in str(decision)


def test_without_both_measured_the_rank_stands(add_kernel, request_of, timed):
    for name, rank in (("a", NATIVE + 5), ("b", NATIVE), ("c", OFFLOAD)):
        add_kernel(name, rank)
    timed({"b.stub": 1.0})
    assert qcore.resolve(request_of()).plugin == "a"
    timed({"b.stub": 1.0, "c.stub": 0.5})
    resolver.forget()
    decision = qcore.resolve(request_of())
    places = [c.plugin for c in decision.candidates if c.rank is not None]
    assert places[:3] == ["a", "c", "b"]


def test_a_slow_kernel_goes_down_and_lifts_no_other(add_kernel, request_of, timed):
    for name, rank in (("slow", NATIVE + 5), ("new", NATIVE)):
        add_kernel(name, rank)
    timed({"slow.stub": 13.0, "torch.plain.linear": 0.14})
    decision = qcore.resolve(request_of())
    assert [c.plugin for c in decision.candidates if c.rank is not None] == ["new", "torch", "slow"]


def test_measured_times_decide_across_ranks_and_are_shown(add_kernel, request_of, timed):
    add_kernel("a", NATIVE, note="on a card")
    add_kernel("b", OFFLOAD)
    timed({"a.stub": 13.0, "b.stub": 20.0, "torch.plain.linear": 0.14})
    decision = qcore.resolve(request_of())
    assert decision.plugin == "torch"
    assert reason_of(decision, "torch") == ("measured faster than a.stub, b.stub, which ranks higher; plain torch ops")
    assert reason_of(decision, "a") == "torch.plain.linear measured faster; on a card"
    assert "[13 ms measured]" in str(decision)
    assert not decision.hints


def test_the_users_order_beats_measured_times_and_is_told(add_kernel, request_of, timed):
    add_kernel("a", NATIVE)
    timed({"a.stub": 13.0, "torch.plain.linear": 0.14})
    decision = qcore.resolve(request_of(), backends="a")
    assert decision.plugin == "a"
    assert decision.hints == (
        "a.stub was measured slower than the fallback: 13 ms, against 0.14 ms for torch.plain.linear.",
    )


def test_strict_keeps_a_plugin_before_a_faster_fallback(add_kernel, request_of, timed):
    add_kernel("a", NATIVE)
    timed({"a.stub": 13.0, "torch.plain.linear": 0.14})
    decision = qcore.resolve(request_of(), strict=True)
    assert decision.plugin == "a"
    assert "slower than the fallback" in decision.hints[0]


def test_a_software_device_stays_last_however_fast(add_kernel, request_of, timed):
    add_kernel("soft", EMULATED)
    timed({"soft.stub": 0.1, "torch.plain.linear": 9.0})
    decision = qcore.resolve(request_of())
    assert decision.plugin == "torch"
    assert reason_of(decision, "soft") == "torch.plain.linear ranks higher"


def test_several_offers_of_one_plugin_are_ranked_one_by_one(add_plugin, stub, request_of):
    def offers(request):
        return [Offer(stub("mine.slow", request), NATIVE - 1), Offer(stub("mine.fast", request), NATIVE)]

    add_plugin("mine", linear=offers)
    decision = qcore.resolve(request_of())
    assert [c.kernel for c in decision.candidates][:2] == ["mine.fast", "mine.slow"]


def test_refusals_carry_their_reason(add_plugin, request_of):
    add_plugin("mine", linear=lambda request: Refusal("needs K to be a multiple of 128"))
    row = next(c for c in qcore.resolve(request_of()).candidates if c.plugin == "mine")
    assert (row.stage, row.reason) == ("refused", "needs K to be a multiple of 128")


def test_a_plugin_without_the_contract_refuses(add_plugin, request_of):
    add_plugin("mine", conv2d=lambda request: pytest.fail("asked"))
    row = next(c for c in qcore.resolve(request_of()).candidates if c.plugin == "mine")
    assert (row.stage, row.reason) == ("refused", "has no kernels for linear")


class _Nameless:
    pass


@pytest.mark.parametrize(
    "answer",
    [None, False, True, [], [None], "no", Refusal(""), Offer(None), Offer(_Nameless()), [Refusal("not in a list")]],
)
def test_an_answer_that_says_nothing_is_flagged_once(add_plugin, request_of, answer):
    add_plugin("mine", linear=lambda request: answer)
    with pytest.warns(QcoreWarning, match=r"'mine' .* is skipped: qcore_linear returned"):
        decision = qcore.resolve(request_of())
    assert stages(decision)["mine"] == "offer failed"
    assert decision.plugin == "torch"


def test_a_rank_that_is_no_number_is_flagged(add_plugin, stub, request_of):
    add_plugin("mine", linear=lambda request: Offer(stub("mine.k", request), "high"))
    with pytest.warns(QcoreWarning, match="is skipped"):
        assert qcore.resolve(request_of()).plugin == "torch"


@pytest.mark.parametrize("error", [ValueError("bad maths"), SystemExit(2)])
def test_an_offer_that_raises_is_passed_over_with_one_warning(add_plugin, request_of, error):
    def offer(request):
        raise error

    add_plugin("mine", linear=offer)
    with pytest.warns(QcoreWarning, match=f"qcore_linear raised {type(error).__name__}"):
        decision = qcore.resolve(request_of())
    assert stages(decision)["mine"] == "offer failed"
    qcore.resolve(request_of())  # and no second warning


def test_an_offer_that_raises_in_a_named_plugin_fails_loudly(add_plugin, request_of):
    def offer(request):
        raise ValueError("bad maths")

    add_plugin("mine", linear=offer)
    with pytest.raises(PluginError, match="qcore_linear raised ValueError: bad maths") as caught:
        qcore.resolve(request_of(), backends="mine")
    assert isinstance(caught.value.__cause__, ValueError)


def test_strict_turns_the_fallback_into_an_error_with_the_table(add_plugin, request_of):
    add_plugin("mine", linear=lambda request: Refusal("only on Tuesdays"))
    with pytest.raises(UnsupportedError, match="strict: only the fallback") as caught:
        qcore.resolve(request_of(), strict=True)
    assert str(qcore.resolve(request_of())) in str(caught.value)
    assert "only on Tuesdays" in str(caught.value)


def test_strict_takes_what_is_no_fallback(add_kernel, request_of):
    add_kernel("mine")
    assert qcore.resolve(request_of(), strict=True).plugin == "mine"


def test_strict_takes_the_fallback_where_it_was_asked_for(request_of):
    assert qcore.resolve(request_of(), strict=True, backends="torch").is_fallback
    with pytest.raises(UnsupportedError), qcore.using("linear=torch;*=xla", strict=True), pytest.warns(QcoreWarning):
        qcore.resolve(request_of("w8a16", contract="embedding"))


def test_nobody_is_an_error_with_the_table(monkeypatch, request_of):
    monkeypatch.setattr(resolver, "ask", lambda status, request, order=(): [])
    with pytest.raises(UnsupportedError, match="no kernel supports this request"):
        qcore.resolve(request_of())


def test_decisions_are_cached_by_request_and_settings(add_plugin, request_of):
    asked = []

    def offer(request):
        asked.append(request)
        return Refusal("no")

    add_plugin("mine", linear=offer)
    first = qcore.resolve(request_of())
    assert qcore.resolve(request_of()) is first
    assert len(asked) == 1
    assert qcore.resolve(request_of(), backends="torch") is not first
    qcore.resolve(request_of(n=32))
    assert [request.n for request in asked] == [16, 16, 32]


def test_a_new_plugin_voids_the_cache(add_kernel, request_of):
    assert qcore.resolve(request_of()).plugin == "torch"
    add_kernel("mine")
    assert qcore.resolve(request_of()).plugin == "mine"
    registry.remove("mine")
    assert qcore.resolve(request_of()).plugin == "torch"


def test_the_cache_is_bounded(monkeypatch, request_of):
    monkeypatch.setattr(resolver, "CACHE_LIMIT", 2)
    for n in (16, 32, 48):
        qcore.resolve(request_of(n=n), verify="off")
    assert len(resolver._decisions) <= 2


def test_observers_hear_of_each_fresh_decision_once(add_plugin, request_of):
    heard = []
    add_plugin("ear", decided=lambda decision: heard.append(decision))  # noqa: PLW0108 - pluggy wants an argument name

    def deaf(decision):
        raise RuntimeError("no")

    add_plugin("broken-ear", decided=deaf)
    decision = qcore.resolve(request_of())
    qcore.resolve(request_of())
    assert heard == [decision]


def test_threads_decide_once(add_plugin, request_of):
    heard, barrier = [], threading.Barrier(6)
    add_plugin("ear", decided=lambda decision: heard.append(decision))  # noqa: PLW0108 - pluggy wants an argument name

    def work():
        barrier.wait()
        qcore.resolve(request_of())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == 1


def test_a_kernel_that_failed_in_use_is_skipped_until_forgotten(add_kernel, request_of):
    add_kernel("mine")
    first = qcore.resolve(request_of())
    resolver.report_failure(request_of(), first.kernel, "pack raised X")
    second = qcore.resolve(request_of())
    assert (second.plugin, stages(second)["mine"]) == ("torch", "failed in use")
    assert "pack raised X" in str(second)
    assert qcore.resolve(request_of("w8a16")).plugin == "mine"
    resolver.withdraw_failure(request_of(), first.kernel)
    assert qcore.resolve(request_of()).plugin == "mine"
    resolver.report_failure(request_of(), first.kernel, "pack raised X")
    resolver.forget()
    assert qcore.resolve(request_of()).plugin == "mine"


def test_hints_about_hardware_without_its_plugin(monkeypatch, request_of):
    from qcore.discovery import hardware

    monkeypatch.setattr(hardware, "present", lambda: (hardware.Hardware("Some GPU", ("somewhere",), "PCI 1"),))
    assert "hint: Some GPU present (PCI 1), but no plugin for it: pip install qcore-somewhere" in str(
        qcore.resolve(request_of())
    )


def test_plugins_whose_name_is_taken_are_rows_too(monkeypatch, request_of):
    lost = registry.status("torch")
    monkeypatch.setattr(registry, "_extra", [lost.__class__("x", "late", "3", "name conflict", "taken by early")])
    assert any((c.stage, c.dist) == ("name conflict", "late") for c in qcore.resolve(request_of()).candidates)


def test_a_device_of_another_machine_is_decided_without_a_check(request_of):
    if torch.accelerator.is_available():
        pytest.skip("this machine has one")
    decision = qcore.resolve(request_of(device="cuda"))
    assert decision.plugin == "torch"
    assert decision.hints[-1] == "torch cannot use 'cuda' on this machine, so no kernel was verified."


def test_offers_for_lists_every_offer(add_kernel, add_plugin, request_of):
    add_kernel("mine")
    add_plugin("no", linear=lambda request: Refusal("no"))
    names = [offer.kernel.name for _, offer in offers.offers_for(request_of())]
    assert "mine.stub" in names
    assert any(name.startswith("torch.") for name in names)
    assert all(status.name != "mine" for status, _ in offers.offers_for(request_of(), frozenset({"mine"})))


def test_strict_names_who_would_serve_if_asked(add_kernel, request_of):
    add_kernel("mine", qcore.EMULATED)
    with pytest.raises(UnsupportedError, match="ranks first for this request; name mine in backends to select it"):
        qcore.resolve(request_of(), strict=True)
    assert qcore.resolve(request_of(), strict=True, backends="mine").plugin == "mine"


@pytest.mark.parametrize("rank", [10**9, -(10**9), 10**400, NATIVE + 500, EMULATED - 501, True])
def test_ranks_out_of_bounds_are_flagged(add_plugin, stub, request_of, rank):
    add_plugin("mine", linear=lambda request: Offer(stub("mine.k", request), rank))
    with pytest.warns(QcoreWarning, match="skipped: the rank of its Offer is"):
        assert qcore.resolve(request_of()).plugin == "torch"


@pytest.mark.parametrize("rank", [NATIVE + 499, EMULATED - 499])
def test_ranks_within_their_tiers_are_taken(add_plugin, stub, request_of, rank):
    add_plugin("mine", linear=lambda request: Offer(stub("mine.k", request), rank))
    assert qcore.resolve(request_of(), backends="mine").plugin == "mine"


def test_a_plugin_that_changes_its_request_changes_nobody_elses(add_plugin, request_of):
    seen = []

    def change(request):
        object.__setattr__(request, "n", 5)
        return Refusal("no")

    add_plugin("a", linear=change)
    add_plugin("b", linear=lambda request: (seen.append(request.n), Refusal("no"))[1])
    wanted = request_of()
    qcore.resolve(wanted)
    assert seen == [16]
    assert wanted.n == 16


def test_errors_that_differ_each_time_are_one_warning(add_plugin, request_of):
    asked = []

    def offer(request):
        asked.append(request)
        raise ValueError(f"error {len(asked)}")

    add_plugin("mine", linear=offer)
    with pytest.warns(QcoreWarning, match="error 1"):
        qcore.resolve(request_of(n=16))
    qcore.resolve(request_of(n=32))
    qcore.resolve(request_of(n=48))


def test_kernels_that_fail_under_ever_new_names_come_to_an_end(add_plugin, stub, request_of):
    from qcore.resolving.binding import WeightStore, bind

    asked = []

    def offer(request):
        asked.append(request)
        return Offer(stub(f"mine.{len(asked)}", request, "pack"))

    add_plugin("mine", linear=offer)
    store = WeightStore(qcore.quantize(torch.ones(16, 64), "int4-g32"))
    with qcore.using(verify="off"), pytest.warns(QcoreWarning, match="cannot pack") as caught:
        assert bind(store, request_of()).decision.plugin == "torch"
    assert len(caught) == 1
