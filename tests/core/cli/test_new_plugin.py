"""`qcore new-plugin`: what it writes builds, installs, is found and passes the conformance kit."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from qcore import QcoreError
from qcore.cli import scaffold
from qcore.cli.output import WRONG_USAGE


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("My-Chip", "Did you mean 'my_chip'?"),
        ("qcore-fast", "Did you mean 'fast'?"),
        ("9", "cannot name a plugin.\n"),
        ("", "cannot name"),
        ("a" * 41, "at most 40"),
        ("../up", "Did you mean 'up'?"),
        ("json", "a module of Python"),
        ("lambda", "a word"),
        ("cuda", "qcore's own"),
        ("torch", "qcore's own"),
    ],
)
def test_names_that_cannot_be(name, text):
    with pytest.raises(QcoreError) as caught:
        scaffold.check_name(name)
    assert text in str(caught.value)


def test_a_name_that_is_taken(add_plugin):
    add_plugin("mine")
    with pytest.raises(QcoreError, match="installed: qcore-mine"):
        scaffold.check_name("mine")


def test_writes_no_half_package(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(scaffold, "_publish", full)
    with pytest.raises(OSError, match="no space"):
        scaffold.write({"a/b": "text"}, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_overwrites_nothing(run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    code, _, err = run("new-plugin", "acme", "--directory", tmp_path)
    assert code == WRONG_USAGE
    assert "not an empty directory" in err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_fills_an_empty_directory(run_json, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, found = run_json("new-plugin", "two_words", "--directory", ".")
    assert code == 0
    assert sorted(found["files"]) == sorted(p.as_posix() for p in Path().rglob("*") if p.is_file())
    project = Path("pyproject.toml").read_text()
    assert 'name = "qcore-two-words"\n' in project
    assert 'dependencies = ["qcore>=26.11"]\n' in project
    assert '[project.entry-points."qcore.plugins.v1"]\ntwo_words = "qcore_two_words.plugin"\n' in project


def test_nothing_is_left_to_fill_in():
    for path, text in scaffold.render("acme").items():
        assert "$" not in text, path


@pytest.mark.parametrize("check", [("check", "--select", "E,F,I,UP,B,SIM,RUF"), ("format", "--check")])
def test_rendered_code_is_clean(tmp_path, check):
    scaffold.write(scaffold.render("acme"), tmp_path / "p")
    command = [sys.executable, "-m", "ruff", *check, "--line-length", "120", "--isolated", tmp_path / "p"]
    ruff = subprocess.run(command, check=False, capture_output=True, text=True)
    if "No module named ruff" in ruff.stderr:
        pytest.skip("ruff is not installed here")
    assert ruff.returncode == 0, ruff.stdout


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A new environment that sees this one's packages, and in it the wheel of a generated package."""
    folder = tmp_path_factory.mktemp("new-plugin")
    scaffold.write(scaffold.render("acme"), folder / "qcore-acme")
    venv.create(folder / "venv", with_pip=False)
    scripts = "Scripts" if os.name == "nt" else "bin"
    python = folder / "venv" / scripts / "python"
    paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    (site / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "qcore-acme"], check=True
    )
    (wheel,) = folder.glob("*.whl")
    # With its dependencies: qcore>=26.11 has to be what is here already.
    subprocess.run([*pip, "--python", python, "install", "--no-index", wheel], check=True)
    return folder, python


def in_scratch(scratch, *arguments):
    folder, python = scratch
    command = [python, "-m", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder / "qcore-acme", timeout=600)


def test_generated_package_is_found(scratch):
    done = in_scratch(scratch, "qcore", "plugins", "--json")
    (found,) = [p for p in json.loads(done.stdout) if p["name"] == "acme"]
    assert (found["state"], found["dist"], found["device"]) == ("available", "qcore-acme", "CPU")


@pytest.mark.slow
def test_generated_package_passes_the_kit(scratch):
    done = in_scratch(scratch, "qcore", "conformance", "acme", "--json", "--output", "c.json", "--html", "c.html")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert found["counts"]["passed"] > 100
    assert found["counts"]["failed"] == found["counts"]["gap"] == 0
    folder = scratch[0] / "qcore-acme"
    assert json.loads((folder / "c.json").read_text())["ok"]
    assert "acme" in (folder / "c.html").read_text()


@pytest.mark.slow
def test_generated_package_passes_its_own_tests(scratch):
    done = in_scratch(scratch, "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "acme" in done.stdout + done.stderr
