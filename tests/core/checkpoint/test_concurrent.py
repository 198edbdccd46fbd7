"""One directory, several savers and readers, and savers that die: what loads is the old state or the new one.

Who was not told to overwrite a target replaces nothing that others put there meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from foreign_layers import FOLDER, frozen
from grids import sampled

import qcore
from qcore.checkpoint import quantize_checkpoint, writing

_SCRIPT = Path(__file__).with_name("crashing.py")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks")


def counts(*arguments: object) -> dict[str, int]:
    """What the script counts; it fails if it finds a state that is neither old nor new."""
    command = [sys.executable, _SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_a_save_that_dies_leaves_the_old_state_or_the_new_one(tmp_path):
    steps = counts(tmp_path, "steps")
    assert len(steps) == 13
    assert steps["shards to shards"] > 20
    assert min(steps.values()) > 4


@pytest.mark.parametrize("savers", sampled(["two savers", "one saver"], 1))
def test_readers_see_whole_states_while_savers_are_killed(tmp_path, savers):
    found = counts(tmp_path, savers, 3)
    assert found["loads"] > 30
    assert found["kills"] > 10
    assert found["values"] > 1


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_meanwhile_stays(links, tmp_path, monkeypatch):
    if not links:
        monkeypatch.setattr("os.link", _no_links)
    target, source = tmp_path / "new.safetensors", FOLDER / "gguf_q4_0.gguf"
    with pytest.raises(qcore.CheckpointError, match=r"created by another process.*\n.*overwrite"):
        qcore.convert(source, target, progress=lambda *_: target.write_text("theirs"))
    assert target.read_text() == "theirs"
    qcore.convert(source, target, overwrite=True)
    target.unlink()
    qcore.convert(source, target)
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def _no_links(*_):
    raise PermissionError


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("job", ["quantize", "convert"])
def test_a_directory_that_appears_meanwhile_stays(job, early, tmp_path, monkeypatch):
    """Before the first tensor is written, or after: it was replaced with all files in it."""
    target, source = tmp_path / "new", tmp_path / "source"

    def appear(*_):
        target.mkdir(exist_ok=True)
        (target / "thesis.txt").write_text("years")

    if job == "quantize":
        qcore.save({"weight": torch.randn(8, 32)}, source)
    else:
        frozen("gptq_4_sym_v1_g128").write(source)
    if early:
        monkeypatch.setattr(writing, "_check_names", appear)
    progress = False if early else appear
    with pytest.raises(qcore.CheckpointError, match="created by another process"):
        quantize_checkpoint(source, target, "w8a16", progress=progress) if job == "quantize" else qcore.convert(
            source, target, progress=progress
        )
    assert [path.name for path in target.iterdir()] == ["thesis.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "source"]
