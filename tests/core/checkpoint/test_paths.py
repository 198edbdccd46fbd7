"""Paths: long names, names that are no ASCII, links, files that the operating system does not let us read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from foreign_layers import FOLDER, frozen
from torch import nn

import qcore
from qcore import CheckpointError
from qcore.checkpoint import inspect, load_, quantize_checkpoint, save, staging, writing

posix = pytest.mark.skipif(os.name != "posix", reason="names and links of POSIX")
STATE = {"weight": torch.ones(4, 8), "bias": torch.zeros(4)}
LONG = ["\u4e2d" * 80, "\U0001f600" * 60, "\u00e9" * 121, "a" * 243, "x\ny", " ", "-", "%s"]


def fresh() -> nn.Module:
    return nn.Linear(8, 4)


def check(path: Path) -> None:
    model = fresh()
    load_(model, path)
    assert torch.equal(model.weight, STATE["weight"])


@posix
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("suffix", [".safetensors", ""])
def test_any_name_of_a_file_system(tmp_path, nothing_left, name, suffix):
    path = tmp_path / f"{name}{suffix}"
    for _ in range(2):
        save(STATE, path)
        check(path)
        nothing_left()
    quantize_checkpoint(path, tmp_path / f"{name[::-1]}.q.safetensors"[-85:], "w8a16")
    nothing_left()


@posix
@pytest.mark.parametrize("name", LONG)
def test_names_of_temporaries_are_valid_and_known(tmp_path, name):
    temporary = staging.temporary_name(tmp_path / f"{name}.safetensors", staging.new_id())
    assert len(temporary.encode()) <= 255  # strict: without lone surrogates
    assert staging.save_id_of(tmp_path / temporary)
    (tmp_path / temporary).write_bytes(b"")
    staging.clean(tmp_path, f"{name}.safetensors")  # that of a save that died: nobody holds its lock
    assert not list(tmp_path.iterdir())


@posix
def test_a_link_to_a_file_with_another_suffix(tmp_path):
    """In a cache of downloads, ``model.safetensors`` is a link to a file whose name is a hash."""
    save(STATE, tmp_path / "m.safetensors")
    (tmp_path / "blobs").mkdir()
    blob = (tmp_path / "m.safetensors").rename(tmp_path / "blobs" / "0123abcd")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    before = blob.stat().st_ino
    save(STATE, link)
    assert link.is_symlink()
    assert blob.stat().st_ino != before
    check(link)


@posix
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_with_another_name_to_a_file(tmp_path, exists):
    """Such as ``latest`` to the newest of several files."""
    if exists:
        save(STATE, tmp_path / "m.safetensors")
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "m.safetensors")
    save(STATE, link)
    assert link.is_symlink()
    assert (tmp_path / "m.safetensors").is_file()
    check(link)


@pytest.mark.parametrize("read", [inspect, lambda path: load_(fresh(), path)], ids=["inspect", "load"])
@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "a\0b.safetensors"])
def test_paths_that_cannot_be(read, path):
    with pytest.raises(CheckpointError):
        read(path)


@pytest.mark.parametrize("name", ["m.safetensors", "config.json", "m.gguf"])
def test_files_that_must_not_be_read(tmp_path, monkeypatch, name):
    frozen("gptq_4_sym_v1_g128").write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "m.safetensors")
    (tmp_path / "m.gguf").write_bytes((FOLDER / "gguf_q4_0.gguf").read_bytes())
    opened = Path.open

    def fail(self, *given, **named):
        if self.name == name:
            raise PermissionError(13, "Permission denied")
        return opened(self, *given, **named)

    monkeypatch.setattr(Path, "open", fail)
    path = tmp_path / ("m.gguf" if name == "m.gguf" else "m.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read: Permission denied\.\nCheck the path"):
        inspect(path)


@pytest.mark.parametrize("value", [None, [STATE], 5, "model"])
def test_only_models_and_mappings_can_be_saved(tmp_path, value):
    with pytest.raises(CheckpointError, match=r"cannot save a \w+\.\nPass a model"):
        save(value, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


@posix
@pytest.mark.parametrize("limit", [None, 100])
def test_file_systems_without_modes_and_syncs(tmp_path, monkeypatch, limit):
    """FAT has no modes, and network file systems cannot flush directories: neither is a failed save."""

    def fail(handle, *_):
        raise OSError(95, "Operation not supported")

    synced = os.fsync
    monkeypatch.setattr(os, "fchmod", fail)
    monkeypatch.setattr(
        os, "fsync", lambda handle: (fail if stat.S_ISDIR(os.fstat(handle).st_mode) else synced)(handle)
    )
    for path in (tmp_path / "m.safetensors", tmp_path / "d"):
        for _ in range(2):
            save(STATE, path, max_shard_size=limit if path.name == "d" else None)
            check(path)


@posix
def test_a_directory_that_cannot_be_listed(tmp_path, monkeypatch):
    save(STATE, tmp_path / "d", max_shard_size=100)
    opened = os.open

    def fail(path, flags, *given, **named):
        if Path(path) == tmp_path / "d":
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *given, **named)

    monkeypatch.setattr(os, "open", fail)
    save(STATE, tmp_path / "d", max_shard_size=200)
    check(tmp_path / "d")


def test_a_shard_of_any_number_of_digits(tmp_path):
    with pytest.raises(CheckpointError, match="max_shard_size"):
        save(STATE, tmp_path / "d", max_shard_size="9" * 400 + "GB")


@pytest.mark.parametrize("patterns", [5, [5], [None], {"a": 1, 2: 3}])
def test_patterns_are_texts(patterns):
    with pytest.raises(qcore.FormatError, match="is not a pattern"):
        qcore.quantize_(fresh(), "w8a16", exclude=patterns)


def test_targets_with_impossible_names(tmp_path):
    save(STATE, tmp_path / "m.safetensors")
    for name in ("a" * 300, "b/" * 3000):
        for run in (
            lambda path: quantize_checkpoint(tmp_path / "m.safetensors", path, "w8a16"),
            lambda path: save(STATE, path),
        ):
            with pytest.raises(CheckpointError, match="cannot be written: File name too long"):
                run(tmp_path / name)


def side_files(root: Path, files: dict[str, str]) -> Path:
    """A float checkpoint with further files; links into ``blobs``, as in the hub's cache."""
    source, blobs = root / "snapshot", root / "blobs"
    source.mkdir()
    blobs.mkdir()
    save({"a.weight": torch.ones(64, 64)}, source / "model.safetensors")
    for i, (name, text) in enumerate(files.items()):
        (blobs / str(i)).write_text(text)
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).symlink_to(blobs / str(i))
    return source


@posix
def test_links_of_a_cache_are_copied_as_files(tmp_path):
    source = side_files(tmp_path, {"tokenizer.json": "{}", "LICENSES/first.txt": "free"})
    quantize_checkpoint(source, tmp_path / "own", "w8a16")
    found = [tmp_path / "own" / name for name in ("tokenizer.json", "LICENSES/first.txt")]
    assert [file.read_text() for file in found] == ["{}", "free"]
    assert not any(file.is_symlink() for file in found)


@posix
@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("place", ["link to a folder", "link to a file", "file"])
def test_nothing_outside_the_target_changes(tmp_path, monkeypatch, exchanged, place):
    source = side_files(tmp_path, {"tokenizer.json": "new", "LICENSES/first.txt": "new"})
    if not exchanged:
        monkeypatch.setattr(writing, "can_be_replaced", lambda _: False)
    target, outside = tmp_path / "own", tmp_path / "outside"
    save({"a.weight": torch.ones(8, 64)}, target)
    outside.mkdir()
    for name in ("first.txt", "tokenizer.json"):
        (outside / name).write_text("old")
    if place == "link to a folder":
        (target / "LICENSES").symlink_to(outside)
    elif place == "link to a file":
        (target / "LICENSES").symlink_to(outside / "first.txt")
        (target / "tokenizer.json").symlink_to(outside / "tokenizer.json")
    else:
        (target / "LICENSES").write_text("old")
    quantize_checkpoint(source, target, "w8a16", overwrite=True)
    assert {file.name: file.read_text() for file in outside.iterdir()} == {"first.txt": "old", "tokenizer.json": "old"}
    assert (target / "LICENSES" / "first.txt").read_text() == (target / "tokenizer.json").read_text() == "new"
    assert not any(path.is_symlink() for path in target.rglob("*"))
