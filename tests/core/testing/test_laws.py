import threading
from dataclasses import replace

import pytest
import torch

import qcore
from qcore import testing
from qcore.testing.kit import Kit
from qcore.testing.laws import LAWS
from qcore.testing.preflight import Preflight

INAPPLICABLE = ("discovery", "devices", "indices")
"""Laws without a subject in a plugin of this process that offers linear layers on the CPU."""
ONE = {"schemes": ["w8a16"], "contracts": ["linear"], "seed": 1}


def outcome(name, law, **more):
    (result,) = [r for r in testing.run(name, select=f"{law}[", **{**ONE, **more}).laws if r.law == law]
    return result.outcome, result.reason


def call(change):
    def method(self, x, packed, bias, **given):
        return change(super(type(self), self).__call__(x, packed, bias, **given), x)

    return {"__call__": method}


@pytest.mark.parametrize("law", [law.name for law in LAWS if law.name not in INAPPLICABLE])
def test_good_plugin_keeps_it(add, law):
    found = outcome(add(), law)
    assert found == ("passed", ""), found[1]


@pytest.mark.parametrize("law", INAPPLICABLE)
def test_law_that_does_not_apply_says_why_and_is_no_failure(add, law):
    certificate = testing.run(add(), select=f"{law}[", **ONE)
    (found,) = certificate.laws
    assert found.outcome == "inapplicable"
    assert found.reason
    assert certificate.ok


def test_fake_of_another_dtype(add):
    name = add(**call(lambda y, x: y if type(x) is torch.Tensor else y.double()))
    assert outcome(name, "fake") == (
        "failed",
        "toy.linear: its fake has dtype torch.float64, the real result has torch.float32",
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fake_of_another_dtype_for_one_dtype_only(add, dtype):
    """As of a fake that says float32, whatever x is."""
    wrong = getattr(torch, dtype)
    name = add(**call(lambda y, x: y.float() if type(x) is not torch.Tensor and x.dtype == wrong else y))
    assert outcome(name, "fake") == (
        "failed",
        f"toy.linear: its fake has dtype torch.float32, the real result has torch.{dtype}",
    )


@pytest.mark.parametrize("change", [lambda y: y.t().contiguous().t(), lambda y: torch.cat((y, y), -1)[:, : y.shape[1]]])
def test_result_that_is_not_contiguous(add, change):
    state, reason = outcome(add(**call(lambda y, x: change(y))), "outputs")
    assert state == "failed"
    assert reason.startswith("toy.linear: its result of shape (17, 32) has strides (")
    assert reason.endswith("return y.contiguous()")


KEPT = []


def _keeping(kind):
    def called(self, x, packed, bias, **given):
        y = super(type(self), self).__call__(x, packed, bias, **given)
        KEPT.append({"x": x, "result": y.detach(), "packed": packed}[kind])
        return y

    def pack(self, weight):
        packed = super(type(self), self).pack(weight)
        KEPT.append(packed)
        return packed

    return {"pack": pack} if kind == "weight" else {"__call__": called}


@pytest.mark.parametrize("kind", ["x", "result", "packed", "weight"])
def test_kernel_that_keeps_memory(add, kind):
    state, reason = outcome(add(**_keeping(kind)), "memory")
    KEPT.clear()
    assert state == "failed"
    assert "toy.linear: 8 rounds of pack and call left " in reason
    assert reason.endswith("keep no x, result or packed weight, or hold it weakly")


def test_kernel_that_keeps_a_buffer_for_a_shape_leaks_nothing(add):
    buffers = {}
    name = add(**call(lambda y, x: (buffers.setdefault(tuple(x.shape), torch.empty_like(y)), y)[1]))
    assert outcome(name, "memory") == ("passed", "")


def test_kernel_that_reads_values_cannot_be_faked_or_compiled(add):
    name = add(**call(lambda y, x: y if x.sum().item() > -1e9 else -y))
    state, reason = outcome(name, "fake")
    assert state == "failed"
    assert "under fake tensors raised" in reason
    assert outcome(name, "compile")[0] == "failed"


def test_graph_per_row_count(add):
    state, reason = outcome(add(**call(lambda y, x: y + 0 if x.shape[0] == 3 else y)), "compile")
    assert state == "failed"
    assert "needs a separate graph" in reason


def test_wrong_only_when_compiled(add):
    state, reason = outcome(add(**call(lambda y, x: y + 1 if torch.compiler.is_compiling() else y)), "compile")
    assert state == "failed"
    assert "returned a wrong result" in reason


def test_noise(add):
    state, reason = outcome(add(**call(lambda y, x: y + torch.rand_like(y) * 1e-7)), "determinism")
    assert state == "failed"
    assert "two calls with the same input differ" in reason


def test_kernel_that_cannot_be_shared_by_threads(add):
    def fussy(y, x):
        return y if threading.current_thread() is threading.main_thread() else y + 1

    def raising(y, x):
        assert threading.current_thread() is threading.main_thread()
        return y

    assert "differs from the result of a single thread" in outcome(add(**call(fussy)), "threads")[1]
    assert "raised AssertionError" in outcome(add(**call(raising)), "threads")[1]


def test_empty_input_that_gives_a_row(add):
    state, reason = outcome(add(**call(lambda y, x: y if len(x) else y.new_zeros(1, y.shape[1]))), "empty")
    assert state == "failed"
    assert "returned shape (1, 32) instead of (0, 32)" in reason


def test_op_without_a_fake(add, loopback):
    library = torch.library.Library("qcore_faulty", "FRAGMENT")
    library.define("lazy(Tensor x) -> Tensor")
    library.impl("lazy", lambda x: x, "CPU")
    state, reason = outcome(add(**call(lambda y, x: torch.ops.qcore_faulty.lazy(y))), "opcheck")
    assert state == "failed"
    assert "opcheck of qcore_faulty.lazy" in reason


def test_module_that_is_served_by_somebody_else(add):
    state, reason = outcome(add(**call(lambda y, x: y + 1)), "decision")
    assert state == "failed"
    assert "torch ran instead of toy: toy.linear failed verification" in reason


def test_format_that_is_lost_or_wrong(add):
    def halved(self, weight):
        packed = super(type(self), self).pack(weight)
        return {**packed, "codes": packed["codes"] // 2 * 2}

    assert "unpack(pack(w)) is not w" in outcome(add(pack=halved), "formats")[1]
    assert "wrong result" in outcome(add(**call(lambda y, x: y + 1)), "formats")[1]


def test_unusual_request_answered_with_an_accident(add):
    class Careless:
        @qcore.hookimpl
        def qcore_linear(self, request):
            return qcore.Refusal("no") if request.x_dtype != torch.float64 else 1 / 0

    state, reason = outcome(add("careless", Careless()), "requests")
    assert state == "failed"
    assert "ZeroDivisionError" in reason


def test_plugin_that_serves_nothing(add):
    class Idle:
        @qcore.hookimpl
        def qcore_linear(self, request):
            return qcore.Refusal("not today")

    assert outcome(add("idle", Idle()), "offers")[0] == "failed"
    assert outcome("idle", "fake") == ("refused", "the plugin refuses it: not today")
    certificate = testing.run("idle", **ONE)
    assert {r.outcome for r in certificate.cases} == {"refused"}
    assert {"results", "compile", "large", "formats", "neighbour"} <= set(certificate.unshown)
    assert not replace(certificate, laws=tuple(r for r in certificate.laws if r.law != "offers")).ok


@pytest.mark.parametrize(
    ("flight", "text"),
    [
        (Preflight(modules=("triton", "re")), "imports triton"),
        (Preflight(libraries=("/usr/lib/libcuda.so.1",)), "loads /usr/lib/libcuda.so.1"),
        (Preflight(libraries=("/p/toy/native.so",), home="/p/toy"), "loads /p/toy/native.so"),
        (Preflight(died="the process ended with status -6"), "status -6"),
        (Preflight(error="OSError: x"), "OSError: x"),
    ],
)
def test_heavy_entry_points(add, flight, text):
    kit = Kit(add(), **ONE, select="discovery[")
    kit.target.preflight = flight
    result = kit.run_law(kit.laws[0])
    assert result.outcome == "failed"
    assert text in result.reason


def test_light_entry_point(add):
    kit = Kit(add(), **ONE, select="discovery[")
    kit.target.preflight = Preflight(modules=("qcore_toy",), libraries=("/usr/lib/libz.so",), home="/p/toy")
    assert kit.run_law(kit.laws[0]).outcome == "passed"


def test_hook_misspelt_and_unmarked(add):
    import types

    module = types.ModuleType("toy_module")
    source = (
        "import qcore\n@qcore.hookimpl\ndef qcore_probe(): return qcore.Available()\ndef qcore_linaer(request): ..."
    )
    exec(source, vars(module))
    state, reason = outcome(add("module", module), "hooks")
    assert state == "failed"
    assert reason == "qcore_linaer looks like a typo of the hook qcore_linear, and lacks @qcore.hookimpl"


def test_kernel_error_outside_a_call_is_a_failure_not_a_crash(add):
    class Strange(torch.Tensor):
        def detach(self):
            raise RuntimeError("device lost")

    certificate = testing.run(
        add(**call(lambda y, x: y.as_subclass(Strange))), select="linear[w8a16-float32-k-5", **ONE
    )
    assert {r.outcome for r in certificate.cases} == {"failed"}
