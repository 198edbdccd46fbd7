"""What a save leaves of what stood there: rights, links, temporaries of others. How files of other kinds are named."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import qcore
from qcore import CheckpointError
from qcore.checkpoint import archive, inspect, load_, quantize_checkpoint, save, staging, writing

posix = pytest.mark.skipif(os.name != "posix", reason="modes and locks of POSIX")
STATE = {f"{name}.weight": torch.ones(4, 8) for name in "abcd"}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def index_of(directory: Path) -> dict:
    return json.loads((directory / "model.safetensors.index.json").read_text())


# Rights.


@posix
@pytest.mark.parametrize("bits", [0o600, 0o640, 0o444, 0o664])
def test_a_file_keeps_its_mode(tmp_path, bits):
    path = tmp_path / "m.safetensors"
    save(STATE, path)
    path.chmod(bits)
    save(STATE, path)
    assert mode(path) == bits
    quantize_checkpoint(path, tmp_path / "q.safetensors", "w8a16")
    (tmp_path / "q.safetensors").chmod(bits)
    quantize_checkpoint(path, tmp_path / "q.safetensors", "w8a16", overwrite=True)
    assert mode(tmp_path / "q.safetensors") == bits


@posix
@pytest.mark.parametrize("before", [200, None])
@pytest.mark.parametrize("after", [300, None])
def test_a_directory_keeps_the_modes_of_its_files(tmp_path, before, after):
    path = tmp_path / "d"
    save(STATE, path, max_shard_size=before)
    path.chmod(0o750)
    for file in path.iterdir():
        file.chmod(0o600)
    save(STATE, path, max_shard_size=after)
    assert {mode(file) for file in path.iterdir()} == {0o600}
    assert mode(path) == 0o750


@posix
@pytest.mark.parametrize("in_place", [False, True])
def test_a_replaced_directory_keeps_its_mode(tmp_path, monkeypatch, in_place):
    if in_place:
        monkeypatch.setattr(writing, "can_be_replaced", lambda _: False)
    source, target = tmp_path / "in", tmp_path / "d"
    save(STATE, source, max_shard_size=200)
    (source / "config.json").write_text('{"new": 1}')
    quantize_checkpoint(source, target, "w8a16", max_shard_size=100)
    target.chmod(0o2750)
    (target / "config.json").write_text('{"old": 1}')
    (target / "tokenizer.json").write_text("old")
    for file in target.glob("*.safetensors*"):
        file.chmod(0o640)
    before = target.stat()
    quantize_checkpoint(source, target, "w8a16", max_shard_size=100, overwrite=True)
    after = target.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert {mode(file) for file in target.glob("*.safetensors*")} == {0o640}
    assert "new" in json.loads((target / "config.json").read_text())
    assert not (target / "tokenizer.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "in"]
    assert len(inspect(target)) == 4


@posix
@pytest.mark.parametrize("in_place", [False, True])
def test_a_replacement_that_fails_leaves_the_old_one(tmp_path, monkeypatch, in_place):
    """Its configuration, too, which other tools need."""
    source, target = tmp_path / "in", tmp_path / "d"
    save(STATE, source, max_shard_size=200)
    (source / "config.json").write_text('{"new": 1}')
    quantize_checkpoint(source, target, "w8a16", max_shard_size=100)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    if in_place:
        monkeypatch.setattr(writing, "can_be_replaced", lambda _: False)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing._DirectorySave, "_write_index", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        quantize_checkpoint(source, target, "w8a16-g4", max_shard_size=100, overwrite=True)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "in"]


@posix
def test_what_a_dead_save_left_does_not_prevent_a_replacement(tmp_path):
    save(STATE, tmp_path / "in", max_shard_size=200)
    save(STATE, tmp_path / "d", max_shard_size=200)
    dead = tmp_path / "d" / staging.temporary_name(tmp_path / "d" / "model", staging.new_id())
    dead.mkdir()
    (dead / "model-00001-of-00004.safetensors").write_bytes(b"half")
    quantize_checkpoint(tmp_path / "in", tmp_path / "d", "w8a16", overwrite=True)
    assert not dead.exists()
    (tmp_path / "d" / "other").mkdir()
    (tmp_path / "d" / "other" / "model.safetensors").write_bytes(b"theirs")
    with pytest.raises(CheckpointError, match="more than one checkpoint"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "d", "w8a16", overwrite=True)


@posix
def test_what_is_written_is_never_readable_to_more(tmp_path, monkeypatch):
    path, seen = tmp_path / "m.safetensors", []
    save(STATE, path)
    path.chmod(0o600)
    original = writing.as_bytes

    def look(tensor: Tensor) -> memoryview:
        seen.extend(mode(file) for file in tmp_path.iterdir())
        return original(tensor)

    monkeypatch.setattr(writing, "as_bytes", look)
    save(STATE, path)
    assert set(seen) == {0o600}
    assert len(seen) > 4


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_root_keeps_the_owner(tmp_path):
    path = tmp_path / "m.safetensors"
    save(STATE, path)
    os.chown(path, 12345, 54321)
    path.chmod(0o640)
    save(STATE, path)
    assert (path.stat().st_uid, path.stat().st_gid, mode(path)) == (12345, 54321, 0o640)


@posix
def test_a_group_that_cannot_be_kept_gets_no_more_than_others(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    save(STATE, path)
    path.chmod(0o664)
    rights = staging.Rights.of(path)
    assert rights is not None

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fchown", refuse)
    with path.open("rb") as file:
        staging.Rights(rights.mode, rights.owner, rights.group + 1).apply_to(file.fileno())
    assert mode(path) == 0o644


# Links.


@posix
def test_links_are_followed_to_a_file_and_to_a_directory(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "d").symlink_to("real")
    (tmp_path / "f.safetensors").symlink_to("real/f.safetensors")
    for limit in (200, 300, None):
        save(STATE, tmp_path / "d", max_shard_size=limit)
        load_(nn.Identity(), tmp_path / "d", strict=False)
    save(STATE, tmp_path / "f.safetensors")
    save(STATE, tmp_path / "f.safetensors")
    assert (tmp_path / "d").is_symlink()
    assert (tmp_path / "f.safetensors").is_symlink()
    assert sorted(path.name for path in (tmp_path / "real").iterdir()) == ["f.safetensors", "model.safetensors"]


@posix
def test_a_link_in_a_directory_is_replaced_but_not_its_target(tmp_path):
    """The hub's cache is made of such directories; its blobs are shared."""
    save({"a": torch.zeros(2)}, tmp_path / "blob.safetensors")
    before = (tmp_path / "blob.safetensors").read_bytes()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "model.safetensors").symlink_to(tmp_path / "blob.safetensors")
    save(STATE, tmp_path / "d")
    assert (tmp_path / "blob.safetensors").read_bytes() == before
    assert len(inspect(tmp_path / "d")) == 4
    (tmp_path / "d" / "model.safetensors").unlink()
    (tmp_path / "d" / "model.safetensors").symlink_to(tmp_path / "blob.safetensors")
    save(STATE, tmp_path / "d", max_shard_size=200)
    assert (tmp_path / "blob.safetensors").read_bytes() == before
    assert len(inspect(tmp_path / "d")) == 4


@posix
def test_a_circle_of_links_is_an_error(tmp_path):
    (tmp_path / "a.safetensors").symlink_to("b.safetensors")
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")
    with pytest.raises(CheckpointError):
        load_(nn.Linear(2, 2), tmp_path / "a.safetensors")


# The save that shards belong to.


def test_index_and_shards_name_one_save(tmp_path):
    saves = set()
    for limit in (200, 200, 300):
        save(STATE, tmp_path / "d", max_shard_size=limit)
        tree = index_of(tmp_path / "d")
        for shard in set(tree["weight_map"].values()):
            with safetensors.safe_open(tmp_path / "d" / shard, "pt") as file:
                assert file.metadata()["qcore.save"] == tree["metadata"]["qcore.save"]
        saves.add(tree["metadata"]["qcore.save"])
        assert len(list((tmp_path / "d").iterdir())) == len(inspect(tmp_path / "d").shards) + 1
    assert len(saves) == 3


def test_shards_of_two_saves_are_refused(tmp_path):
    for name in "de":
        save(STATE, tmp_path / name, max_shard_size=200)
    shard = "model-00002-of-00004.safetensors"
    (tmp_path / "d" / shard).write_bytes((tmp_path / "e" / shard).read_bytes())
    with pytest.raises(CheckpointError, match="belongs to another save"):
        inspect(tmp_path / "d")
    tree = index_of(tmp_path / "d")
    del tree["metadata"]
    (tmp_path / "d" / "model.safetensors.index.json").write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match="belongs to another save"):
        inspect(tmp_path / "d")


def test_shards_without_a_save_load_as_before(tmp_path):
    (tmp_path / "d").mkdir()
    names = {key: f"model-{i:05d}-of-00004.safetensors" for i, key in enumerate(STATE, 1)}
    for key, name in names.items():
        safetensors.torch.save_file({key: STATE[key]}, tmp_path / "d" / name)
    tree = {"metadata": {"total_size": 512}, "weight_map": names}
    (tmp_path / "d" / "model.safetensors.index.json").write_text(json.dumps(tree))
    assert len(inspect(tmp_path / "d")) == 4
    save(STATE, tmp_path / "d", max_shard_size=300)
    assert not set(names.values()) & {path.name for path in (tmp_path / "d").iterdir()}
    (tmp_path / "d" / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"shards .* but no index"):
        inspect(tmp_path / "d")


def test_a_shard_that_goes_while_a_directory_is_opened(tmp_path, monkeypatch):
    save({name: tensor * 0 for name, tensor in STATE.items()}, tmp_path / "d", max_shard_size=200)
    original, saves = archive.Archive._add, []

    def interrupted(self: archive.Archive, *args: object) -> None:
        if len(saves) < 3:
            saves.append(1)
            save(STATE, tmp_path / "d", max_shard_size=200 + len(saves))
        original(self, *args)

    monkeypatch.setattr(archive.Archive, "_add", interrupted)
    with archive.Archive.open(tmp_path / "d") as found:
        for file in (tmp_path / "d").iterdir():  # what is open stays
            file.unlink()
        assert all(bool(found.read(name).all()) for name in STATE)
    assert len(saves) == 3


def test_patience_ends(tmp_path, monkeypatch):
    save(STATE, tmp_path / "d", max_shard_size=200)
    monkeypatch.setattr(archive, "_RETRY_SECONDS", 0.1)

    def replaced(self: archive.Archive, *_: object) -> None:
        save(STATE, tmp_path / "d", max_shard_size=200)
        raise FileNotFoundError(2, "gone")

    monkeypatch.setattr(archive.Archive, "_add", replaced)
    with pytest.raises(CheckpointError, match="cannot be read: gone"):
        inspect(tmp_path / "d")


def test_one_file_over_a_directory_with_an_index_of_another_name(tmp_path):
    save({"old": torch.ones(2), "older": torch.ones(2)}, tmp_path / "d", max_shard_size=8)
    (tmp_path / "d" / "model.safetensors.index.json").rename(tmp_path / "d" / "x.safetensors.index.json")
    save(STATE, tmp_path / "d")
    assert len(inspect(tmp_path / "d")) == 4


# Temporaries.


@posix
@pytest.mark.parametrize("target", ["m.safetensors", "d"])
def test_temporaries_of_the_dead_go_and_those_of_the_living_stay(tmp_path, target):
    path = tmp_path / target
    dead = path.with_name(staging.temporary_name(path, staging.new_id()))
    dead.mkdir() if target == "d" else dead.write_bytes(b"half")
    with (
        staging.staging(path, staging.new_id()) as living,
        staging.replace_atomically(path.with_name("m.safetensors")) as file,
    ):
        file.write(b"half")
        save(STATE, path)
        assert not dead.exists()
        assert living.is_dir()
        assert len(staging.temporaries(tmp_path)) == 2
        if target != "d":
            path.unlink()
    assert not staging.temporaries(tmp_path)


@posix
def test_temporaries_of_another_machine_go_by_their_age(tmp_path):
    path = tmp_path / "m.safetensors"
    names = [f".m.safetensors.{'0' * 8}-{staging.new_id()}.tmp", f".m.safetensors.{staging.new_id()}.tmp"]
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    other = tmp_path / f".other.safetensors.{staging.new_id()}.tmp"
    other.write_bytes(b"half")
    save(STATE, path)
    assert len(staging.temporaries(tmp_path)) == 3
    long_ago = time.time() - 2 * staging.ABANDONED_SECONDS
    for temporary in staging.temporaries(tmp_path):
        os.utime(temporary, (long_ago, long_ago))
    save(STATE, path)
    assert staging.temporaries(tmp_path) == [other]


@posix
def test_without_locks_a_save_works_and_age_decides(tmp_path, monkeypatch):
    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(staging._fcntl, "flock", none)
    dead = tmp_path / staging.temporary_name(tmp_path / "d", staging.new_id())
    dead.mkdir()
    for limit in (200, 300, None, 200):
        save(STATE, tmp_path / "d", max_shard_size=limit)
        assert len(inspect(tmp_path / "d")) == 4
    assert dead.is_dir()


@posix
def test_a_lock_that_nobody_lets_go_does_not_hold_up_forever(tmp_path, monkeypatch):
    save(STATE, tmp_path / "d", max_shard_size=200)
    monkeypatch.setattr(staging, "LOCK_SECONDS", 0.05)
    with staging.publish_lock(tmp_path / "d") as locked:
        assert locked
        save(STATE, tmp_path / "d", max_shard_size=300)
    assert len(inspect(tmp_path / "d").shards) == 2


def test_two_new_directories_at_once(tmp_path, monkeypatch):
    """The other save was quicker; this one is later, so it counts."""
    original = writing._put_in_place

    def late(*args: object, **given: object) -> None:
        monkeypatch.setattr(writing, "_put_in_place", original)
        save({"other": torch.ones(2), "more": torch.ones(2)}, tmp_path / "d", max_shard_size=8)
        original(*args, **given)

    monkeypatch.setattr(writing, "_put_in_place", late)
    save(STATE, tmp_path / "d", max_shard_size=200)
    assert len(inspect(tmp_path / "d")) == 4
    assert len(list((tmp_path / "d").iterdir())) == 5


def test_a_directory_that_appears_is_not_overwritten_unasked(tmp_path, monkeypatch):
    save(STATE, tmp_path / "in.safetensors")
    original = writing._put_in_place

    def late(*args: object, **given: object) -> None:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "thesis.txt").write_text("years")
        original(*args, **given)

    monkeypatch.setattr(writing, "_put_in_place", late)
    with pytest.raises(CheckpointError, match="created by another process"):
        quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "d", "w8a16")
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["thesis.txt"]


# What save must not lose, and what it cannot hold.


def test_lazy_bits_offsets_and_overlaps(tmp_path):
    numbers, row = torch.randn(4, dtype=torch.complex64), torch.randn(6)
    state = {
        "imaginary": numbers.imag,
        "negated": numbers.conj().imag,
        "numbers": numbers,
        "conjugate": numbers.conj(),
        "row": row,
        "same": row[:],
        "tail": row[1:],
        "steps": row[::2],
        "wide": row[:3].expand(2, 3),
        "minus": torch._neg_view(row),
        "other dtype": row.view(torch.int32),
        "zeros": torch._efficientzerotensor((3,)),
    }
    save(state, tmp_path / "m.safetensors")
    found = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert state.keys() - found.keys() == {"same"}
    for name, tensor in found.items():
        assert tensor.tolist() == state[name].clone().tolist(), name
    model = nn.Module()
    for name, tensor in state.items():
        model.register_buffer(name, torch.empty(tensor.shape, dtype=tensor.dtype))
    load_(model, tmp_path / "m.safetensors")
    for name, tensor in model.named_buffers():
        assert tensor.tolist() == state[name].clone().tolist(), name


class Wrapper(Tensor):
    """A tensor without memory of its own, as a DTensor is."""

    @staticmethod
    def __new__(cls, inner: Tensor):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"a": Wrapper(torch.ones(2))}, "safetensors cannot store Wrapper"),
        ({0: torch.ones(2)}, "cannot save 0: .* not a valid name"),
        ({"__metadata__": torch.ones(2)}, "not a valid name"),
        ({"\ud800": torch.ones(2)}, "not a valid name"),
        ({"w": qcore.quantize(torch.ones(2, 8), "int8"), "w.data": torch.ones(2)}, "is stored under that name"),
    ],
)
def test_what_cannot_be_stored_is_said(tmp_path, state, text):
    with pytest.raises(CheckpointError, match=text):
        save(state, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_header_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "MAX_HEADER", 100)
    with pytest.raises(CheckpointError, match="max_shard_size"):
        save(STATE, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


# Files of other kinds.


@pytest.mark.parametrize(
    ("name", "content", "what", "remedy"),
    [
        ("m.bin", b"PK\x03\x04" + bytes(64), "pickle or zip", "never unpickles"),
        ("m.pt", b"\x80\x02}q\0." + bytes(64), "pickle or zip", "never unpickles"),
        ("m.h5", b"\x89HDF\r\n\x1a\n" + bytes(64), "HDF5", "framework"),
        ("m.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS", "git lfs pull"),
        ("model.safetensors.index.json", b'{"weight_map": {}}', "JSON", "directory"),
        ("m.npz", b"PK\x03\x04" + bytes(64), "zip archive", ""),
        ("m.onnx", b"\x08\x07" + b"\xff" * 64, "ONNX", "safetensors"),
    ],
)
def test_other_formats_are_named(tmp_path, name, content, what, remedy):
    (tmp_path / name).write_bytes(content)
    calls = (
        inspect,
        lambda path: load_(nn.Linear(2, 2), path),
        lambda path: quantize_checkpoint(path, tmp_path / "out", "w8a16"),
    )
    for call in calls:
        with pytest.raises(CheckpointError) as caught:
            call(tmp_path / name)
        first, _, rest = str(caught.value).partition("\n")
        assert what in first
        assert remedy in rest


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "m.onnx"])
def test_directories_of_other_formats(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(bytes(64))
    for call in (inspect, lambda path: quantize_checkpoint(path, path.with_name("out"), "w8a16")):
        with pytest.raises(CheckpointError, match=rf"holds neither .*, but {name}, which is"):
            call(tmp_path)
