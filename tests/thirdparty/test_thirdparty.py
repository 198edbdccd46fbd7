"""Third-party distributions, good and bad: the program survives them, and the kit tells them apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from processes import installed_plugins

pytestmark = pytest.mark.grid  # minutes: wheels of many plugins, and a process for each scenario

HERE = Path(__file__).parent


def _load(name):
    # Tests are imported by path, so the neighbours are not importable by name.
    spec = spec_from_file_location(f"thirdparty_{name}", HERE / f"{name}.py")
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


distributions = _load("distributions")
LIFECYCLE = {bad.name: bad for bad in distributions.LIFECYCLE}
KERNELS = {bad.name: bad for bad in distributions.KERNELS}
CASES = {"schemes": ["w4a16-g32-asym"], "select": ["linear[w4a16-g32-asym-float32"]}
CLOSE = 1e-3


class Run:
    """A subprocess and what it printed."""

    def __init__(self, site: list[Path], cache: Path, **wanted) -> None:
        path = os.pathsep.join([*map(str, site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": path, "QCORE_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
        environment["QCORE_DISABLE"] = installed_plugins()  # only the plugins of ``site`` are under test
        command = [sys.executable, str(HERE / "scenario.py"), json.dumps({**CASES, **wanted})]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False)
        self.status, self.errors = done.returncode, done.stderr
        self.found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}

    def used(self, backends=""):
        assert self.status == 0, self.errors
        return self.found["used"][backends]

    def kit(self, name):
        assert self.status == 0, self.errors
        return self.found["kit"][name]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    where = tmp_path_factory.mktemp("wheels")
    trees = tmp_path_factory.mktemp("trees")
    roots = {name: bad.render(trees) for name, bad in {**LIFECYCLE, **KERNELS}.items()}
    return {
        name: distributions.build(root, where) for name, root in {**roots, "loopback": distributions.LOOPBACK}.items()
    }


@pytest.fixture(scope="session")
def runs(wheels, tmp_path_factory):
    """Everything that takes a process, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        wanted = {
            "good": pool.submit(_good, wheels, tmp_path_factory.mktemp("good")),
            "kernels": pool.submit(_kernels, wheels, tmp_path_factory.mktemp("kernels")),
            "zoo": pool.submit(_zoo, wheels, tmp_path_factory.mktemp("zoo")),
        }
        for name in LIFECYCLE:
            wanted[name] = pool.submit(_lifecycle, name, wheels, tmp_path_factory.mktemp(name))
        return {name: future.result() for name, future in wanted.items()}


def _good(wheels, where):
    """The whole kit on a few schemes: one of every kind of activation."""
    site = distributions.pip_install([wheels["loopback"]], where / "site")
    schemes = ("w8a16", "w4a16-g32-fzp", "w4a8-g32-asym-aasym", "w8a8-static-o8")
    select = [*(f"[{s}-float32" for s in schemes), *(f"-{s}]" for s in schemes), "[plugin]"]
    return Run([site], where / "cache", use=["loopback"], kit=["loopback"], select=select, schemes=None)


def _kernels(wheels, where):
    site = [distributions.install(wheels[name], where / name) for name in ("loopback", *KERNELS)]
    select = [*CASES["select"], "discovery", "hooks"]
    scheme = f"[linear-{CASES['schemes'][0]}]"
    more = {"one_buffer": [f"outputs{scheme}"], "small_only": [f"large{scheme}"], "lossy_layout": ["formats["]}
    return Run(site, where / "cache", use=list(KERNELS), kit=list(KERNELS), select=select, more=more)


def _zoo(wheels, where):
    """All of them in one environment."""
    site = distributions.pip_install([w for name, w in wheels.items() if name != "aborts"], where / "site")
    return Run([site], where / "cache", use=["loopback"], probe_seconds=0.5)


def _lifecycle(name, wheels, where):
    site = [distributions.install(wheels[name], where / "site")]
    first = Run(site, where / "cache", probe_seconds=0.5, kit=[] if name == "aborts" else [name])
    if name != "aborts":
        return first
    assert first.status != 0, "a probe that aborts ends the first process"
    return Run(site, where / "cache", kit=[name])


def test_loopback_serves_when_asked_for(runs):
    used = runs["good"].used("loopback")
    assert used["served"] == ["loopback", "loopback"], used["tables"]
    assert used["worst"] < CLOSE
    assert used["warnings"] == []


def test_loopback_is_honest_about_its_rank(runs):
    assert runs["good"].used()["served"] == ["torch", "torch"]


def test_loopback_passes_the_kit(runs):
    kit = runs["good"].kit("loopback")
    assert kit["ok"], kit["text"]
    assert len(kit["cases"]) > 150
    outcomes = set(kit["cases"].values())
    refused = {case for case, outcome in kit["cases"].items() if outcome == "refused"}
    assert outcomes == {"passed", "refused"}
    # It knows integers, and has no hook for experts.
    assert all(case.startswith("grouped_linear[") or "[wfp" in case or "[wnf" in case for case in refused)


LIFECYCLE_SAYS = {
    "import_raises": ("import failed", "OSError: libfancy.so.3"),
    "import_exits": ("import failed", "sys.exit(3)"),
    "misspelt": ("registration failed", "unknown hook 'qcore_linaer'. Did you mean 'qcore_linear'?"),
    "wrong_api": ("wrong API", "qcore.plugins.v0"),
    "hangs": ("probe failed", "did not answer within 0.5 seconds"),
    "aborts": ("probe failed", "ended an earlier process"),
}


@pytest.mark.parametrize("name", LIFECYCLE)
def test_program_survives_a_plugin_that_does_not_come_up(runs, name):
    run, (state, reason) = runs[name], LIFECYCLE_SAYS[name]
    used = run.used()
    assert used["served"] == ["torch", "torch"]
    assert used["worst"] < CLOSE
    assert run.found["status"][name][0] == state
    assert reason in run.found["status"][name][1]
    (told,) = [text for text in used["warnings"] if name in text]
    assert state in told
    assert f"QCORE_DISABLE={name}" in told


@pytest.mark.parametrize("name", LIFECYCLE)
def test_kit_catches_a_plugin_that_does_not_come_up(runs, name):
    kit = runs[name].kit(name)
    state, reason = LIFECYCLE_SAYS[name]
    assert not kit["ok"]
    assert kit["state"] == state
    assert reason in kit["failures"][0]["reason"]


# What the resolver's table says of the plugin (None: it serves, and rightly for all that a program can see), then the
# law that the kit finds broken, and a part of the reason.
KERNEL_SAYS = {
    "unreasonable": (
        "offer failed",
        "refusals",
        "returned Refusal(reason=''), not an Offer",
    ),
    "falsy": ("offer failed", "refusals", "returned False, not an Offer"),
    "wrong_sign": ("failed verification", "results", "wrong result"),
    "drops_bias": ("failed verification", "results", "wrong result"),
    "tall": ("failed verification", "results", "wrong result"),
    "odd": ("failed verification", "results", "wrong result"),
    "lossy": ("failed verification", "pack", "unpack(pack(w)) is not w: scale differs"),
    "secret": (None, "no-fallback", "falls back secretly"),
    "secret_kernel": (None, "no-fallback", "falls back secretly"),
    "wrong_dtype": ("failed verification", "results", "returned dtype torch.float64 instead of torch.float32"),
    "raises": ("failed verification", "raises", "RuntimeError: device lost"),
    "heavy": ("refused", "discovery", "imports dpctl"),
    "unmarked": ("refused", "hooks", "qcore_linear is not marked with @qcore.hookimpl"),
    "zeroes_x": ("failed verification", "inputs", "changed its input in place: x"),
    "one_buffer": ("failed verification", "outputs", "a later call changed the result of an earlier one"),
    "small_only": (None, "large", "wrong in the rows and columns sampled"),
    "lossy_layout": ("refused", "formats", "layout 'lossy_nibbles' of plugin 'lossy_layout' is broken"),
    "mutates": (None, "inputs", "changed its input in place: packed scale"),
}


DEFECTIVE = [name for name, (stage, *_) in KERNEL_SAYS.items() if stage == "offer failed"]


@pytest.mark.parametrize("name", DEFECTIVE)
def test_plugin_without_a_proper_answer_is_an_error_if_named(runs, name):
    used = runs["kernels"].used(name)
    assert f"plugin {name!r}" in used["error"]
    assert KERNEL_SAYS[name][2].split(",")[0] in used["error"]


@pytest.mark.parametrize("name", DEFECTIVE)
def test_plugin_without_a_proper_answer_costs_itself_only(runs, name):
    used = runs["kernels"].used()
    rows = [line for table in used["tables"] for line in table.splitlines() if line.startswith(f"{name} ")]
    assert rows
    assert all("offer failed" in row for row in rows)


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in DEFECTIVE])
def test_program_survives_a_bad_kernel(runs, name):
    used, stage = runs["kernels"].used(name), KERNEL_SAYS[name][0]
    assert used["worst"] < (CLOSE if name != "mutates" else 1e-2)
    if stage is not None:
        rows = [line for table in used["tables"] for line in table.splitlines() if line.startswith(f"{name} ")]
        assert any(stage in row for row in rows), used["tables"]
        assert used["served"][-1] != name  # the odd layer, which every wrong kernel gets wrong
    if stage == "failed verification":
        everywhere = [text for found in runs["kernels"].found["used"].values() for text in found.get("warnings", ())]
        assert any(f"'{name}.linear'" in text and "failed verification" in text for text in everywhere)


@pytest.mark.parametrize("name", KERNELS)
def test_kit_catches_a_bad_kernel(runs, name):
    kit, (_, law, reason) = runs["kernels"].kit(name), KERNEL_SAYS[name]
    assert not kit["ok"], kit["text"]
    assert [f for f in kit["failures"] if f["law"] == law and reason in f["reason"]], kit["text"]


def test_wrong_for_tall_inputs_fails_no_other_case(runs):
    failed = [case for case, outcome in runs["kernels"].kit("tall")["cases"].items() if outcome == "failed"]
    assert [case.split("float32-")[1] for case in failed] == ["m-above-k]", "m-above-k-wide]"]


def test_wrong_for_odd_k_fails_no_other_case(runs):
    failed = [case for case, outcome in runs["kernels"].kit("odd")["cases"].items() if outcome == "failed"]
    assert {case.split("float32-")[1] for case in failed} == {"k-odd]", "k-5]", "bias-ragged]", "strided-odd]"}


def test_program_survives_all_of_them_at_once(runs):
    zoo = runs["zoo"]
    assert zoo.used()["worst"] < 1e-2  # `mutates` may serve: it drifts by what a program cannot see
    loopback = zoo.used("loopback")
    assert loopback["served"] == ["loopback", "loopback"], loopback["tables"]
    assert loopback["worst"] < CLOSE
    here = {"xpu_stand_in", *(path.name for path in (HERE.parents[1] / "plugins").iterdir())}
    assert zoo.found["status"].keys() - here == {*LIFECYCLE, *KERNELS, "loopback", "torch"} - {"aborts"}
