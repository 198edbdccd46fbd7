"""The kit in processes of their own: steps that end their process, or never return, and what is left of a run."""

import json
import os
import subprocess
import sys

import pytest

from qcore import testing
from qcore.errors import ConformanceError
from qcore.runtime import disk_cache

PLUGIN = """
import ctypes, os, signal, time
import torch
import qcore
from qcore.plugin_api import RowsKernel

class Kernel(RowsKernel):
    name = "deadly.linear"

    def __init__(self, request):
        self.n, self.k, self.out_dtype, self.format = request.n, request.k, request.out_dtype, request.weight

    def pack(self, weight):
        return {"data": weight.data, "scale": weight.scale}

    def unpack(self, packed):
        return qcore.QTensor(packed["data"], packed["scale"], None, (self.n, self.k), self.format)

    def run(self, x, packed, bias):
        FATE
        y = x.double() @ self.unpack(packed).dequantize().double().t()
        return (y if bias is None else y + bias.double()).to(self.out_dtype)

@qcore.hookimpl
def qcore_linear(request):
    if request.weight != qcore.Format("int8") or request.activation is not None or request.output is not None:
        return qcore.Refusal("only w8a16 here")
    return qcore.Offer(Kernel(request))

AT_IMPORT
"""
FATES = {
    "faults": ("ctypes.string_at(0)", "killed by SIGSEGV"),
    "exits cleanly": ("os._exit(0)", "exited with status 0"),
    "is interrupted": ("raise KeyboardInterrupt", "KeyboardInterrupt was raised in it"),
    "hangs": ("time.sleep(600)", "did not return in time (the limit is 6 seconds)"),
}
LINEAR = ["--scheme", "w8a16", "--contract", "linear", "--seed", "1"]
FEW = [*LINEAR, "--select", "*float32-k-*", "--select", "determinism*"]


@pytest.fixture
def kit(tmp_path):
    """Install a plugin whose kernel meets a fate, and run the kit's command line on it."""

    def run(fate, *arguments, at_import=""):
        info = tmp_path / "deadly-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deadly\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[qcore.plugins.v1]\ndeadly = deadly_plugin\n")
        (tmp_path / "deadly_plugin.py").write_text(PLUGIN.replace("FATE", fate).replace("AT_IMPORT", at_import))
        output = tmp_path / "certificate.json"
        command = [sys.executable, "-m", "qcore", "conformance", "deadly", "--output", str(output), *arguments]
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=settings, timeout=300)
        return done, json.loads(output.read_text()) if output.exists() else None

    return run


@pytest.mark.parametrize("fate", FATES)
def test_a_step_that_ends_its_process_fails(fate, kit):
    code, words = FATES[fate]
    done, certificate = kit(f"if x.shape[1] == 5:\n            {code}", *FEW, "--step-seconds", "6")
    assert done.returncode == 1, done.stderr
    failed = [one for one in certificate["cases"] if one["outcome"] == "failed"]
    assert [one["id"] for one in failed] == ["linear[w8a16-float32-k-5]"]
    assert words in failed[0]["reason"]
    assert "--select 'linear[w8a16-float32-k-5]'" in failed[0]["reason"]
    assert {one["outcome"] for one in certificate["cases"]} == {"passed", "failed"}
    assert len(certificate["cases"]) == 4
    assert {one["outcome"] for one in certificate["laws"] if one["law"] == "determinism"} == {"passed"}
    assert words in done.stdout


def test_two_processes_share_what_is_left(kit):
    done, certificate = kit("if x.shape[1] in {5, 33}:\n            os.abort()", *FEW, "--jobs", "2")
    failed = {one["id"] for one in certificate["cases"] if one["outcome"] == "failed"}
    assert done.returncode == 1
    assert "linear[w8a16-float32-k-5]" in failed
    assert {one["outcome"] for one in certificate["cases"]} == {"passed", "failed"}


DECISION = [*LINEAR, "--select", "decision[linear-w8a16]"]


def test_a_step_that_is_cut_off_leaves_no_mark(kit):
    """A limit of the kit's has ended the process, and not the verification that ran in the step."""
    done, certificate = kit("time.sleep(600)", *DECISION, "--step-seconds", "6")
    (law,) = [one for one in certificate["laws"] if one["law"] == "decision"]
    assert "did not return in time" in law["reason"], done.stderr
    assert not disk_cache.left_over_marks()


def test_verification_that_ends_its_process_leaves_a_mark(kit):
    kit("os.abort()", *DECISION)
    assert [mark["plugin"] for mark in disk_cache.left_over_marks()] == ["deadly"]


FORKS = """if x.shape[1] == 5:
            if os.fork() == 0:
                time.sleep(8)
                os._exit(0)
            os.abort()
"""


def test_a_child_of_the_kernel_does_not_keep_its_process(kit):
    """It has the pipe, too: the parent aborts, and the child sleeps on."""
    _, certificate = kit(FORKS, *FEW)
    (failed,) = [one for one in certificate["cases"] if one["outcome"] == "failed"]
    assert "killed by SIGABRT" in failed["reason"]


@pytest.mark.grid  # ten processes one after the other
def test_a_kernel_that_always_ends_its_process(kit):
    done, certificate = kit("os.abort()", *LINEAR, "--select", "float32", "--jobs", "2")
    assert done.returncode == 1
    found = [one["outcome"] for one in certificate["cases"]]
    assert 10 <= found.count("failed") <= 11
    assert "skipped" in found
    assert "steps before had ended their process" in done.stdout


def test_an_end_while_loading_is_an_error(kit):
    """Not in the process that tries it first."""
    once = "__import__('multiprocessing').parent_process() and os._exit(4)"
    done, certificate = kit("pass", *FEW, at_import=once)
    assert done.returncode == 2
    assert certificate is None
    first, second = done.stderr.strip().split("\n")
    assert first == "qcore: a process of the kit ended while it loaded the plugin: it exited with status 4."
    assert "qcore doctor" in second


def test_known_gaps_name_what_ends_its_process(kit, tmp_path):
    gaps = tmp_path / "qcore_gaps.toml"
    gaps.write_text('[[gap]]\ncases = "linear[w8a16-float32-k-5]"\nreason = "it is mended in version 2"\n')
    done, certificate = kit("if x.shape[1] == 5:\n            os.abort()", *FEW, "--gaps", str(gaps))
    assert {one["outcome"] for one in certificate["cases"]} == {"passed", "gap"}, done.stdout


def test_a_plugin_of_this_process_is_run_in_it(add):
    certificate = testing.run(add(), schemes=["w8a16"], contracts=["linear"], select="float32-k-5]", jobs=2)
    assert [r.outcome for r in certificate.cases] == [testing.Outcome.PASSED]


def test_an_error_of_the_kit_is_raised_where_it_was_asked_for():
    with pytest.raises(ConformanceError, match="selects no case and no law"):
        testing.run("torch", select="linaer[", jobs=1)


def test_a_run_leaves_no_process():
    from multiprocessing import active_children

    testing.run("torch", schemes=["w8a16"], contracts=["embedding"], select="embedding[", jobs=2, seed=1)
    assert not active_children()
