import json

import pytest

from qcore.testing import case_selection, kit, matrix


@pytest.fixture
def small(monkeypatch):
    """The matrix on one contract and scheme."""
    few = case_selection.cases(["w8a16"], ["embedding"])
    for module in (matrix, kit):
        monkeypatch.setattr(module, "cases", lambda *_: few)


def last(capsys):
    return capsys.readouterr().out.splitlines()


def test_table_summary_and_files(small, capsys, tmp_path):
    files = {name: tmp_path / f"m.{name}" for name in ("json", "html")}
    arguments = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    assert matrix.main(["torch", "--seed", "7", *arguments]) == 0
    out = last(capsys)
    assert "seed 7" in out[0]
    (row,) = [line for line in out if line.startswith("embedding ")]
    assert "w8a16" in row
    assert "✓ plain.embedding 54/54" in row
    passed, failed, skipped = (int(word) for word in out[-1].replace(",", "").split()[::2])
    assert passed > 39
    assert failed == 0
    assert skipped > 0
    found = json.loads(files["json"].read_text())
    assert found["seed"] == 7
    assert found["certificates"][0]["backend"] == "torch"
    assert "qcore" in files["html"].read_text()


@pytest.mark.grid
def test_missing_requirement_fails_with_what_to_do(small, capsys):
    assert matrix.main(["torch", "--quick", "--require", "vulkan", "--require", "torch"]) == 1
    out = last(capsys)
    assert "REQUIRED vulkan is missing: it is not installed; pip install qcore-vulkan" in out
    assert ", 1 failed, " in out[-1]


@pytest.mark.grid
def test_a_sample_of_one_plugin_leaves_the_others_whole(small, capsys):
    passed = {}
    for sampled in ("torch", "another"):
        assert matrix.main(["torch", "--sample", sampled]) == 0
        passed[sampled] = int(last(capsys)[-1].split()[0])
    assert 0 < passed["torch"] < passed["another"]


def test_failures_unavailable_and_broken_plugins(small, add, capsys):
    import qcore

    class Absent:
        @qcore.hookimpl
        def qcore_probe(self):
            return qcore.Unavailable("no chip here. Insert one.")

    class Wrong:
        @qcore.hookimpl
        def qcore_embedding(self, request):
            return False

    names = [add("absent", Absent()), add("wrong", Wrong())]
    assert matrix.main([*names, "--quick", "--require", "absent"]) == 1
    text = "\n".join(last(capsys))
    assert "unavailable: no chip here. Insert one." in text
    assert "· unavailable" in text
    assert "FAILED wrong embedding[w8a16" in text
    assert "REQUIRED absent is missing: unavailable: no chip here. Insert one." in text


def test_every_installed_plugin_runs_by_default(small, monkeypatch):
    asked = []
    monkeypatch.setattr(matrix, "certify", lambda names, *_, **__: asked.extend(names) or [])
    assert matrix.main([]) == 0
    assert "torch" in asked
