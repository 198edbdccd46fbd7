from __future__ import annotations

import json
import os
import sys

import pytest
import torch

from qcore.discovery.kernels import Available
from qcore.discovery.registry import PluginStatus, State
from qcore.resolving import verification
from qcore.runtime.code_state import code_state


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(editable)`` puts the distribution ``sample`` on the path; returns the file of its code."""

    def make(*, editable: bool, url: str | None = None):
        site, source = tmp_path / "site", tmp_path / "source"
        info = site / "sample-1.0.dist-info"
        info.mkdir(parents=True)
        code = (source if editable else site) / "sample" / "kernels.py"
        code.parent.mkdir(parents=True)
        code.write_text("pass\n")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sample\nVersion: 1.0\n")
        (info / "RECORD").write_text("sample/kernels.py,sha256=1,5\n")
        if editable:
            told = {"url": url or source.as_uri(), "dir_info": {"editable": True}}
            (info / "direct_url.json").write_text(json.dumps(told))
        monkeypatch.setattr(sys, "path", [str(site), *sys.path])
        code_state.cache_clear()
        return code

    yield make
    code_state.cache_clear()


def changed(path):
    """The state after the time of ``path`` has changed, as another process would find it."""
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    code_state.cache_clear()
    return code_state("sample")


def test_editable_code_is_identified_by_file_times_and_sizes(install):
    code = install(editable=True)
    first = code_state("sample")
    assert first
    code.write_text("pass  # longer\n")
    assert code_state("sample") == first, "a process keeps the code that it has imported"
    code_state.cache_clear()
    second = code_state("sample")
    assert second != first
    assert changed(code) not in (first, second)


def test_files_that_are_no_code_of_it_do_not_count(install):
    code = install(editable=True)
    first = code_state("sample")
    for name in ("__pycache__/kernels.pyc", ".git/index", "tests/test_it.py", "build/x.o"):
        path = code.parent.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    code_state.cache_clear()
    assert code_state("sample") == first


def test_a_new_file_counts(install):
    code = install(editable=True)
    first = code_state("sample")
    code.with_name("more.py").write_text("")
    code_state.cache_clear()
    assert code_state("sample") != first


def test_an_ordinary_installation_is_told_by_its_record(install):
    code = install(editable=False)
    first = code_state("sample")
    assert changed(code) == first
    record = code.parents[1] / "sample-1.0.dist-info" / "RECORD"
    record.write_text("sample/kernels.py,sha256=2,5\n")
    code_state.cache_clear()
    assert code_state("sample") != first


@pytest.mark.parametrize("text", ["[]", "{", '{"dir_info": 3}', '{"dir_info": {"editable": true}, "url": 5}'])
def test_damaged_metadata_costs_nothing(install, text):
    code = install(editable=True)
    info = code.parents[2] / "site" / "sample-1.0.dist-info"
    (info / "direct_url.json").write_text(text)
    code_state.cache_clear()
    assert isinstance(code_state("sample"), str)


def test_what_is_not_installed_has_no_state():
    assert code_state("no-such-distribution") == ""


def test_the_verdict_belongs_to_the_state_of_the_code(install, stub, request_of):
    code = install(editable=True)
    status = PluginStatus("sample", "sample", "1.0", State.AVAILABLE, device=Available().device)
    request = request_of(dtype=torch.float32)
    kernel = stub("sample.k", request)
    first = verification.verdict_key(status, kernel, request)
    changed(code)
    assert verification.verdict_key(status, kernel, request) != first
