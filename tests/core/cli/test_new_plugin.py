"""`qcore new-plugin`: what it writes builds, installs, is found and passes the conformance kit."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import unmeasured

from qcore import QcoreError
from qcore.cli import scaffold
from qcore.cli.output import WRONG_USAGE


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("My-Chip", "Did you mean 'my_chip'?"),
        ("qcore-fast", "Did you mean 'fast'?"),
        ("9", "is not a valid plugin name.\n"),
        ("", "is not a valid plugin name"),
        ("a" * 41, "at most 40"),
        ("../up", "Did you mean 'up'?"),
        ("json", "standard module"),
        ("lambda", "a Python keyword"),
        ("cuda", "reserved by qcore"),
        ("torch", "reserved by qcore"),
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

    monkeypatch.setattr(scaffold, "_move_into_place", full)
    with pytest.raises(QcoreError, match=r"new: cannot be written: no space left\."):
        scaffold.write({"a/b": "text"}, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_overwrites_nothing(run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    code, _, err = run("new-plugin", "acme", "--directory", tmp_path)
    assert code == WRONG_USAGE
    assert "not an empty directory" in err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_says_where_it_cannot_write(run, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run("new-plugin", "acme", "--directory", tmp_path / "file" / "acme")
    assert code == WRONG_USAGE
    assert err.startswith(f"qcore: {tmp_path / 'file' / 'acme'}: cannot be written: ")
    assert "--directory" in err


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


@pytest.mark.parametrize("native", [False, True])
def test_nothing_is_left_to_fill_in(native):
    for path, text in scaffold.render("acme", native=native).items():
        assert "$" not in text, path
        assert text.endswith("\n"), path
        assert "\n\n\n\n" not in text, path


def test_native_package_has_what_the_other_has_and_more(run_json, tmp_path):
    code, found = run_json("new-plugin", "acme", "--native", "--directory", tmp_path / "p")
    assert code == 0
    assert set(found["files"]) - scaffold.render("acme").keys() == {
        "CMakeLists.txt",
        "native/kernel.cpp",
        "src/qcore_acme/native.py",
    }
    assert "scikit_build_core" in (tmp_path / "p" / "pyproject.toml").read_text()


@pytest.mark.parametrize("native", [False, True])
def test_workflow_runs_the_kit_with_the_seeds_of_a_claim(native):
    text = scaffold.render("acme", native=native)[".github/workflows/conformance.yml"]
    for seed in (0, 1, 2):
        assert f"qcore conformance acme --seed {seed} --output conformance-{seed}.json" in text


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("check", [("check", "--select", "E,F,I,UP,B,SIM,RUF"), ("format", "--check")])
def test_rendered_code_is_clean(tmp_path, check, native):
    scaffold.write(scaffold.render("acme", native=native), tmp_path / "p")
    command = [sys.executable, "-m", "ruff", *check, "--line-length", "120", "--isolated", tmp_path / "p"]
    ruff = subprocess.run(command, check=False, capture_output=True, text=True)
    if "No module named ruff" in ruff.stderr:
        pytest.skip("ruff is not installed here")
    assert ruff.returncode == 0, ruff.stdout


def _environment(folder, *, native):
    """A new environment that sees this one's packages, and in it the wheel of a generated package."""
    scaffold.write(scaffold.render("acme", native=native), folder / "qcore-acme")
    venv.create(folder / "venv", with_pip=False)
    scripts = "Scripts" if os.name == "nt" else "bin"
    python = folder / "venv" / scripts / "python"
    paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    (site / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "qcore-acme"]
    subprocess.run(wheel, check=True, env=unmeasured())
    (wheel,) = folder.glob("*.whl")
    # With its dependencies: qcore>=26.11 has to be what is here already.
    subprocess.run([*pip, "--python", python, "install", "--no-index", wheel], check=True, env=unmeasured())
    return folder, python


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return _environment(tmp_path_factory.mktemp("new-plugin"), native=False)


@pytest.fixture(scope="module")
def native_scratch(tmp_path_factory):
    return _environment(tmp_path_factory.mktemp("new-native-plugin"), native=True)


def in_scratch(scratch, *arguments):
    folder, python = scratch
    command, where = [python, "-m", *arguments], folder / "qcore-acme"
    return subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=where, timeout=600, env=unmeasured()
    )


def assert_passes(scratch):
    """The package's own tests pass, and with them the whole kit, which writes its files beside them."""
    done = in_scratch(scratch, "pytest", "-q", "-p", "no:cacheprovider", "--qcore-json=c.json", "--qcore-html=c.html")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = scratch[0] / "qcore-acme"
    found = json.loads((folder / "c.json").read_text())
    assert found["ok"]
    assert found["complete"]
    assert found["counts"]["passed"] > 100
    assert found["counts"]["failed"] == found["counts"]["gap"] == 0
    assert "acme" in (folder / "c.html").read_text()


def test_generated_package_is_found(scratch):
    done = in_scratch(scratch, "qcore", "plugins", "--json")
    (found,) = [p for p in json.loads(done.stdout) if p["name"] == "acme"]
    assert (found["state"], found["dist"], found["device"]) == ("available", "qcore-acme", "CPU")


@pytest.mark.slow
@pytest.mark.grid
def test_generated_package_passes_its_own_tests_and_the_kit(scratch):
    assert_passes(scratch)


_MISSING = [name for name in ("c++", "cmake") if not shutil.which(name)]
_MISSING += [name for name in ("scikit_build_core",) if not find_spec(name)]


@pytest.mark.skipif(bool(_MISSING), reason=f"building C++ takes {', '.join(_MISSING)}")
class TestNative:
    def test_is_one_wheel_for_every_python_with_its_library_inside(self, native_scratch):
        (wheel,) = native_scratch[0].glob("*.whl")
        assert "-py3-none-" in wheel.name
        assert "none-any" not in wheel.name
        with zipfile.ZipFile(wheel) as archive:
            assert [name for name in archive.namelist() if "libqcore_acme." in name]

    def test_is_found_and_its_library_serves(self, native_scratch):
        code = (
            "import qcore, torch; torch.manual_seed(0); l = torch.nn.Linear(70, 33); x = torch.randn(5, 70)\n"
            "with qcore.using('acme', strict=True):\n"
            "    qcore.quantize_(m := torch.nn.Sequential(l), 'w8a16'); y = m(x)\n"
            "print(m[0].decision.kernel.name, float((y - x @ m[0].weight.dequantize().t() - m[0].bias).abs().max()))"
        )
        done = subprocess.run([native_scratch[1], "-c", code], capture_output=True, text=True, check=True)
        name, worst = done.stdout.split()
        assert name == "acme.w8a16"
        assert float(worst) < 1e-5

    @pytest.mark.grid  # the same kit as for the package without native code, which `tests` runs
    @pytest.mark.slow
    def test_passes_its_own_tests_and_the_kit(self, native_scratch):
        assert_passes(native_scratch)

    def test_whose_library_is_missing_says_what_to_do(self, native_scratch, tmp_path):
        (wheel,) = native_scratch[0].glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path, [name for name in archive.namelist() if "libqcore_acme" not in name])
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        command = [sys.executable, "-W", "ignore", "-m", "qcore", "plugins", "--json"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
        )
        (found,) = [p for p in json.loads(done.stdout) if p["name"] == "acme"]
        assert found["state"] == "unavailable"
        assert "Reinstall qcore-acme" in found["reason"]
