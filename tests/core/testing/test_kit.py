import pytest
import torch

import qcore
from qcore import testing
from qcore.errors import ConformanceError
from qcore.testing.kit import Kit

FEW = {"schemes": ["w8a16"], "contracts": ["linear"], "select": ["linear[w8a16-float32-k"]}


def test_own_kernels_pass(add):
    certificate = testing.run(add(), **FEW)
    assert certificate.ok, str(certificate)
    assert {r.kernels for r in certificate.cases} == {("toy.linear",)}
    assert (certificate.hardware, certificate.driver, certificate.device) == ("a device", "a driver", "cpu")
    assert max(r.worst for r in certificate.cases) <= 1


def test_seed_repeats_the_numbers():
    worst = [[r.worst for r in testing.run("torch", seed=seed, **FEW).cases] for seed in (1, 1, 2)]
    assert worst[0] == worst[1] != worst[2]


def test_seeds_are_fresh_unless_given(add):
    assert testing.run(add(), **FEW).seed != testing.run("toy", **FEW).seed


def test_processes_share_the_cases():
    chosen = {"schemes": ["w8a16"], "contracts": ["embedding"], "select": "embedding[", "seed": 4}
    seen = []
    told = {"progress": lambda done, total, _name: seen.append((done, total))}
    together, alone = testing.run("torch", jobs=2, **told, **chosen), testing.run("torch", **chosen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (len(together.cases), len(together.cases))
    assert [(r.id, r.outcome, r.worst) for r in together.cases] == [(r.id, r.outcome, r.worst) for r in alone.cases]


EMBEDDING = {"schemes": ["w8a16"], "contracts": ["embedding"]}


@pytest.fixture(scope="module")
def whole():
    """A certificate of the cases, for which there was time enough; test_matrix.py runs the laws, which compile."""
    certificate = testing.run("torch", seconds=1e4, select="embedding[", **EMBEDDING)
    assert certificate.ok, str(certificate)
    return certificate


@pytest.mark.parametrize("jobs", [0, 1, 2])
def test_a_limit_of_time_keeps_what_was_found(jobs, whole):
    certificate = testing.run("torch", seconds=0.0, jobs=jobs, **EMBEDDING)
    total = sum(r.reason == "not run within the limit of 0 seconds" for r in certificate.results)
    assert total > len(certificate.cases)  # laws, too
    (failed,) = certificate.failures
    assert failed.id == "finished[plugin]"
    assert failed.reason == f"{total} of {total} steps were not run within the limit of 0 seconds."
    assert {r.outcome for r in certificate.cases} == {testing.Outcome.SKIPPED}
    assert not certificate.ok
    assert [r.id for r in whole.cases] == [r.id for r in certificate.cases]


def test_progress_is_told_before_each_step(add):
    seen = []
    testing.run(add(), progress=lambda done, total, name: seen.append((done, total, name)), **FEW)
    assert [done for done, _, _ in seen] == list(range(len(seen)))
    assert {total for _, total, _ in seen} == {len(seen)}
    assert seen[0][2].startswith("linear[w8a16-float32-k")


def test_unknown_plugin_is_an_error_with_a_suggestion():
    with pytest.raises(ConformanceError, match="Did you mean 'torch'"):
        testing.run("toch")


def test_unknown_contract_is_an_error():
    with pytest.raises(ConformanceError, match="Did you mean 'linear'"):
        testing.run("torch", contracts=["liner"])


def test_pattern_that_selects_nothing_is_an_error(add):
    with pytest.raises(ConformanceError, match="selects no case and no law"):
        testing.run(add(), select=["linear[w8a16", "linaer["])


def test_scheme_outside_the_table_can_be_tested(add):
    certificate = testing.run(add(), schemes=["w4a16-g16-asym"], contracts=["linear"], select="bfloat16-k-odd")
    assert [r.id for r in certificate.cases] == ["linear[w4a16-g16-asym-bfloat16-k-odd]"]
    assert certificate.ok


def test_device_comes_from_the_probe(add):
    assert Kit(add(details={"device": "cpu:0"})).target.device == torch.device("cpu:0")
    assert Kit("toy", device="cpu").target.device == torch.device("cpu")


@pytest.mark.parametrize("device", ["mps", "cuda:77", "meta", "no-such-device", "ch\udc80p", ""])
def test_device_that_torch_cannot_use_here_is_a_clear_error(add, device):
    with pytest.raises(ConformanceError, match=r"you asked for the device.*torch cannot use on this machine") as caught:
        testing.run(add(), device=device, **FEW)
    str(caught.value).encode()
    assert "--device" in str(caught.value)
    with pytest.raises(ConformanceError, match="the probe of 'chip' requests the device"):
        testing.run(add("chip", details={"device": device or "none"}), **FEW)


def test_probe_that_fails_the_second_time_does_not_stop_the_kit(add):
    class Flaky:
        calls = 0

        @qcore.hookimpl
        def qcore_probe(self):
            Flaky.calls += 1
            if Flaky.calls > 1:
                raise OSError("gone")
            return qcore.Available()

    assert Kit(add("flaky", Flaky())).target.device == torch.device("cpu")


def test_plugin_whose_device_is_absent_has_shown_nothing(add):
    class Absent:
        @qcore.hookimpl
        def qcore_probe(self):
            return qcore.Unavailable("no chip. Insert one.")

    certificate = testing.run(add("absent", Absent()))
    assert not certificate.ok
    assert not certificate.failures
    assert certificate.reason == "no chip. Insert one."
    assert Kit("absent").status_result().outcome == "skipped"
    assert Kit("torch").status_result().outcome == "passed"


def test_refusals_need_a_reason(add):
    class Picky:
        @qcore.hookimpl
        def qcore_linear(self, request):
            return qcore.Refusal("no linear today") if request.bias else None

    outcomes = {
        r.id: (r.outcome, r.law) for r in testing.run(add("picky", Picky()), **{**FEW, "select": "float32"}).cases
    }
    assert outcomes["linear[w8a16-float32-bias]"] == ("refused", "")
    assert outcomes["linear[w8a16-float32-k-5]"] == ("failed", "refusals")


@pytest.mark.parametrize(
    ("methods", "law", "text"),
    [
        ({"name": property(lambda self: "other.kernel", lambda self, name: None)}, "origin", "called 'other.kernel'"),
        ({"pack": lambda self, weight: 1 / 0}, "raises", "pack raised ZeroDivisionError"),
        ({"unpack": lambda self, packed: None}, "pack", "a NoneType instead of a QTensor"),
        ({"__call__": lambda self, x, packed, bias: [x]}, "results", "returned list instead of a tensor"),
        ({"__call__": lambda self, x, packed, bias: x.zero_()}, "inputs", "changed its input in place: x"),
    ],
)
def test_faults_are_named_by_the_law_they_break(add, methods, law, text):
    certificate = testing.run(add(**methods), **FEW)
    assert {r.law for r in certificate.cases} == {law}
    assert all(text in r.reason for r in certificate.cases)
    (told,) = [r for r in certificate.laws if r.law == law]
    assert told.outcome == "failed"
    assert f"broken in {len(certificate.cases)} of {len(certificate.cases)} cases" in told.reason


def test_fallback_kernel_under_another_name_is_caught(add):
    from qcore.fallback.plain_linear import PlainLinear

    from .conftest import Plugin

    def offer(request):
        kernel = PlainLinear(request)
        kernel.name = "cover.linear"
        return kernel

    certificate = testing.run(add("cover", Plugin(offer)), **FEW)
    assert {r.law for r in certificate.cases} == {"origin"}


def test_fallback_in_another_thread_is_caught(add):
    import threading

    from qcore.fallback.plain_linear import PlainLinear

    def elsewhere(self, x, packed, bias):
        kernel, found = PlainLinear(self.request), []
        weight = self.unpack(packed)
        worker = threading.Thread(target=lambda: found.append(kernel(x, kernel.pack(weight), bias)))
        worker.start()
        worker.join()
        return found[0]

    certificate = testing.run(add(__call__=elsewhere), **FEW)
    assert {r.law for r in certificate.cases} == {"no-fallback"}
