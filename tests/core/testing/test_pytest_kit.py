import json
import os
import subprocess
import sys

import pytest

import qcore_pytest

PASS = "def test_mine(): pass\n"


def run(where, *arguments, **environment):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=where, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_plugin_of_pytest_imports_no_torch():
    code = "import sys, qcore_pytest; assert not {'torch', 'qcore'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_runs_alone_where_it_is_asked_for_on_the_command_line(tmp_path):
    (tmp_path / "test_own.py").write_text(PASS)
    few = ["-k", "embedding and w8a16-float32-odd or offers", "--qcore-seed", "5", "--qcore-json", "c.json"]
    status, out = run(tmp_path, "--qcore-backend=torch", "--qcore-html=c.html", "-v", *few)
    assert status == 0, out
    assert "conformance of torch, seed 5 (repeat it with --qcore-seed 5)" in out
    assert "torch::embedding[w8a16-float32-odd-d] PASSED" in out
    assert "test_mine" not in out
    assert json.loads((tmp_path / "c.json").read_text())["seed"] == 5
    assert (tmp_path / "c.html").exists()


def test_runs_beside_the_projects_own_tests_if_configured(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = ["--qcore-backend=torch", "--import-mode=importlib"]\ntestpaths = ["."]\n'
    )
    (tmp_path / "test_own.py").write_text(PASS)
    status, out = run(tmp_path, "-v", "-k", "mine or offers")
    assert status == 0, out
    assert "test_own.py::test_mine PASSED" in out
    assert "torch::offers[plugin] PASSED" in out


def test_unknown_backend_is_a_usage_error(tmp_path):
    status, out = run(tmp_path, "--qcore-backend=toch")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "Did you mean 'torch'" in out


def test_outcomes_in_the_terms_of_pytest(tmp_path):
    plugin = (
        "import qcore\n"
        "from qcore.discovery.registry import registry\n"
        "class Toy:\n"
        "    @qcore.hookimpl\n"
        "    def qcore_embedding(self, request):\n"
        "        return qcore.Refusal('too long') if request.n > 100 else False\n"
        "registry.add('toy', Toy())\n"
    )
    (tmp_path / "conftest.py").write_text(plugin)
    (tmp_path / "gaps.toml").write_text('[[gap]]\ncases = "embedding[w8a16-float32-one]"\nreason = "later"\n')
    few = ["-k", "embedding and w8a16-float32", "--qcore-gaps=gaps.toml", "-rfsx", "--rootdir=."]
    status, out = run(
        tmp_path, "--qcore-backend=toy", "--confcutdir=.", "-p", "conftest", *few, PYTHONPATH=str(tmp_path)
    )
    assert status == pytest.ExitCode.TESTS_FAILED, out
    assert "refused: too long" in out
    assert "later (qcore_embedding returned False" in out
    assert "law: refusals" in out
    assert "Traceback" not in out


def test_without_the_option_nothing_is_registered():
    class Config:
        def getoption(self, name):
            return None

    qcore_pytest.pytest_configure(Config())
