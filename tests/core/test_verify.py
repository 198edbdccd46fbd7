from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

import qcore
from qcore.discovery.registry import registry
from qcore.errors import QcoreWarning
from qcore.resolving import verification
from qcore.resolving.offers import kernels_of
from qcore.runtime import disk_cache


def key_of(name, request):
    status = registry.status(name)
    return verification.verdict_key(status, kernels_of(name)(request)[0], request)


def fails(text):
    return pytest.warns(QcoreWarning, match=f"failed verification: {text}")


def test_a_wrong_kernel_is_refused_and_the_next_one_serves(add_kernel, request_of):
    add_kernel("mine", fault="wrong")
    with fails("wrong result for x of shape .*got .*, expected .*, allowed error"):
        decision = qcore.resolve(request_of())
    assert decision.plugin == "torch"
    row = next(c for c in decision.candidates if c.plugin == "mine")
    assert row.stage == "failed verification"
    assert "elements are off" in row.reason


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("lossy", r"unpack\(pack\(w\)\) is not w: scale differs"),
        ("pack", "raised RuntimeError: cannot pack"),
        ("call", "raised RuntimeError: no such instruction"),
    ],
)
def test_other_faults(add_kernel, request_of, fault, words):
    add_kernel("mine", fault=fault)
    with fails(words):
        assert qcore.resolve(request_of()).plugin == "torch"
    qcore.resolve(request_of(), backends="torch")  # another decision, no second warning


@pytest.mark.parametrize("contract", ["linear", "conv2d", "embedding"])
def test_every_contract_is_checked(add_kernel, request_of, contract):
    add_kernel("mine", fault="wrong")
    with fails("wrong result"):
        assert qcore.resolve(request_of("w8a16", contract=contract)).plugin == "torch"


@pytest.mark.parametrize(
    "scheme", ["w8a16", "w4a16-g32-asym", "w8a8", "w8a8-static", "w4a8-g32-token-o8t", "w4a16-g32-fzp"]
)
def test_right_kernels_pass(add_kernel, request_of, scheme):
    add_kernel("mine")
    assert qcore.resolve(request_of(scheme, k=77)).plugin == "mine"


def test_a_passed_verdict_is_kept_on_disk_and_in_memory(add_kernel, request_of):
    made = add_kernel("mine")
    qcore.resolve(request_of())
    calls = sum(kernel.calls for kernel in made.values())
    assert calls == 6  # one row, a few, more rows than columns: twice each
    assert disk_cache.read("verdicts", key_of("mine", request_of()))
    qcore.resolve(request_of(), backends="mine")
    verification.forget()
    qcore.resolve(request_of(), backends="mine,torch")
    assert sum(kernel.calls for kernel in made.values()) == calls


def test_a_failed_verdict_is_kept_for_the_process_only(add_kernel, request_of):
    made = add_kernel("mine", fault="wrong")
    with fails("wrong"):
        qcore.resolve(request_of())
    assert disk_cache.read("verdicts", key_of("mine", request_of())) is None
    (kernel,) = made.values()
    kernel.fault = None
    assert qcore.resolve(request_of(), backends="mine").plugin == "torch"
    verification.forget()
    assert qcore.resolve(request_of(), backends="mine,torch").plugin == "mine"


def test_the_verdict_belongs_to_version_device_driver_and_form(add_plugin, stub, request_of):
    def plugin(version, driver):
        add_plugin(
            "mine",
            version,
            probe=lambda: qcore.Available("card", driver),
            linear=lambda request: qcore.Offer(stub("mine.k", request)),
        )
        return key_of("mine", request_of())

    first = plugin("1", "driver 1")
    assert plugin("1", "driver 1") == first
    assert plugin("2", "driver 1") != first
    assert plugin("1", "driver 2") != first
    key = key_of("mine", request_of())
    assert key_of("mine", request_of(dtype=torch.bfloat16)) != key
    assert key_of("mine", request_of("w4a16-g64")) != key
    # Sizes of equal remainders share a verdict: N = 4096 and 8192 are served by the same code.
    assert key_of("mine", request_of(n=4096, k=4096)) == key_of("mine", request_of(n=8192, k=8192))
    assert key_of("mine", request_of(n=4096, k=4096)) != key_of("mine", request_of(n=4097, k=4096))


def test_large_requests_are_checked_on_a_small_weight(add_plugin, stub, request_of):
    seen = []

    class Kernel(stub):
        def pack(self, weight):
            seen.append(tuple(weight.shape))
            return super().pack(weight)

    add_plugin("mine", linear=lambda request: qcore.Offer(Kernel("mine.k", request)))
    assert qcore.resolve(request_of(n=4096, k=11008)).plugin == "mine"
    assert set(seen) == {(64, 256)}


def test_a_kernel_for_the_large_size_only_is_checked_there(add_plugin, stub, request_of):
    seen = []

    class Kernel(stub):
        def pack(self, weight):
            seen.append(tuple(weight.shape))
            return super().pack(weight)

    def offer(request):
        return qcore.Offer(Kernel("mine.large", request)) if request.n > 100 else qcore.Refusal("too small")

    add_plugin("mine", linear=offer)
    assert qcore.resolve(request_of(n=256, k=64)).plugin == "mine"
    assert set(seen) == {(256, 64)}


def test_off(add_kernel, request_of):
    made = add_kernel("mine", fault="wrong")
    assert qcore.resolve(request_of(), verify="off").plugin == "mine"
    assert all(kernel.calls == 0 for kernel in made.values())


def test_always_runs_in_each_process_whatever_the_disk_says(add_kernel, request_of):
    made = add_kernel("mine")
    qcore.resolve(request_of())
    verification.forget()
    qcore.resolve(request_of(), backends="mine")  # takes the verdict from the disk
    qcore.resolve(request_of(), verify="always")
    assert sum(kernel.calls for kernel in made.values()) == 12
    qcore.resolve(request_of(), verify="always", backends="mine")
    assert sum(kernel.calls for kernel in made.values()) == 12


@pytest.mark.parametrize("mode", ["once", "always"])
def test_a_kernel_that_ended_a_process_is_not_tried_again(add_plugin, stub, request_of, mode):
    code = """
        import os, sys
        from types import ModuleType
        import torch, qcore
        from qcore.resolving.explaining import plain_request
        from qcore.fallback import plugin as builtin
        class Bad(type(builtin.qcore_linear(plain_request("w4a16-g32", n=16, k=64, dtype=torch.float32))[-1].kernel)):
            def pack(self, weight):
                os._exit(7)
        def offer(request):
            kernel = Bad(request)
            kernel.name = "mine.bad"
            return qcore.Offer(kernel)
        plugin = ModuleType("mine")
        plugin.qcore_linear = qcore.hookimpl(offer)
        from qcore.discovery.registry import registry
        registry.add("mine", plugin, "qcore-mine", "1")
        qcore.resolve(plain_request("w4a16-g32", n=16, k=64, dtype=torch.float32))
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == 7
    add_plugin("mine", "1", linear=lambda request: qcore.Offer(stub("mine.bad", request)))
    with fails("ended an earlier process while it was verified; run 'qcore doctor --clear' to retry"):
        assert qcore.resolve(request_of(), verify=mode).plugin == "torch"


def test_plain_ops_serve_after_a_process_died_in_their_check(request_of, monkeypatch):
    """Nothing is behind them: a skipped fallback would leave no kernel until someone clears the mark."""
    request = request_of("nf4")  # no kernel on ops of this processor
    decision = qcore.resolve(request)
    assert decision.kernel.name == "torch.plain.linear"
    status = next(s for s in qcore.plugins() if s.name == "torch")
    key = verification.verdict_key(status, decision.kernel, request)
    disk_cache.write("running", f"verify {key}", pid=2**22 + 12345)
    marks = []
    monkeypatch.setattr(disk_cache, "set_mark", lambda key, **about: marks.append(key))
    verification.forget()
    assert qcore.resolve(request, verify="always").kernel.name == "torch.plain.linear"
    assert not marks


def test_a_mark_of_a_fast_fallback_kernel_says_what_ran(request_of, monkeypatch):
    marks = {}
    monkeypatch.setattr(disk_cache, "set_mark", lambda key, **about: marks.update({key: about}))
    request = request_of("w4a16-g32", dtype=torch.bfloat16)
    verification.forget()
    if qcore.resolve(request, verify="always").kernel.name == "torch.plain.linear":
        pytest.skip("this torch has no int4 product")
    assert {"plugin": "torch", "doing": "the verification of torch.cpu.w4a16"} in marks.values()


def test_without_a_cache_the_kernel_is_checked_in_each_process(add_kernel, request_of, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QCORE_CACHE_DIR", str(tmp_path / "file"))
    made = add_kernel("mine")
    assert qcore.resolve(request_of()).plugin == "mine"
    verification.forget()
    assert qcore.resolve(request_of(), backends="mine").plugin == "mine"
    assert sum(kernel.calls for kernel in made.values()) == 12


def test_the_users_modes_do_not_disturb_the_check(add_kernel, request_of):
    add_kernel("mine")
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"), torch.inference_mode():
        assert qcore.resolve(request_of()).plugin == "mine"


def test_the_users_default_dtype_does_not_disturb_the_check(add_kernel, request_of):
    add_kernel("mine")
    torch.set_default_dtype(torch.float64)
    try:
        assert qcore.resolve(request_of()).plugin == "mine"
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_random_state_is_left_alone(add_kernel, request_of):
    add_kernel("mine")
    before = torch.get_rng_state()
    qcore.resolve(request_of())
    assert torch.equal(torch.get_rng_state(), before)


def test_meta_is_not_checked(add_kernel, request_of):
    made = add_kernel("mine", fault="wrong")
    assert qcore.resolve(request_of(device="meta")).plugin == "mine"
    assert all(kernel.calls == 0 for kernel in made.values())


def test_results_of_the_wrong_kind(request_of, stub):
    class Kernel(stub):
        def __call__(self, x, packed, bias, **given):
            return super().__call__(x, packed, bias, **given).double()

    found = verification.run_check(Kernel("k", request_of()), request_of())
    assert found == verification.Check(
        False, "wrong result for x of shape (1, 64): returned dtype torch.float64 instead of torch.float32"
    )


def test_difference_names_what_differs():
    qt = qcore.quantize(torch.randn(4, 8), "int4-g4")
    assert verification.difference(qt, qt) == ""
    assert verification.difference(None, qt) == "a NoneType instead of a QTensor"
    assert verification.difference(qt.derived(scale=qt.scale * 2), qt) == "scale differs"
    assert verification.difference(qt.narrow(0, 0, 2), qt) == "int4-g4/plain (2, 8) instead of int4-g4/plain (4, 8)"
