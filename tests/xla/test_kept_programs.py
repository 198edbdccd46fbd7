"""Programs on disk: whole files or none, damaged ones replaced, and no error where nothing can be written."""

import hashlib
import zlib

import pytest
import torch
from graph_backends import part_of
from jax._src import monitoring

from qcore.plugin_api import files_dir
from qcore_xla.graphs import program
from qcore_xla.graphs.kept import ProgramFiles


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("QCORE_CACHE_DIR", str(tmp_path))
    return files_dir("xla-programs")


@pytest.fixture
def hits():
    """Programs that were read from disk."""
    found = []

    def listen(name, **_):
        if name == "/jax/compilation_cache/cache_hits":
            found.append(name)

    monitoring.register_event_listener(listen)
    yield found
    monitoring.unregister_event_listener(listen)


def started():
    """What another process would do at its first call."""
    x = torch.linspace(0, 1, 7)
    torch.testing.assert_close(program.Program(part_of(torch.exp, x))([x])[0], x.exp())


@pytest.mark.parametrize("damage", ["garbage", "half", "bit", "empty"])
@torch.no_grad()
def test_damaged_programs_are_replaced(folder, hits, damage):
    started()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    turned = bytes([*whole[:-9], whole[-9] ^ 4, *whole[-8:]])
    file.write_bytes({"garbage": b"xx", "half": whole[: len(whole) // 2], "bit": turned, "empty": b""}[damage])
    started()  # warnings are errors, and would have the part run in torch
    assert not hits
    started()
    assert len(hits) == 1
    assert list(folder.iterdir()) == [file]


@torch.no_grad()
def test_programs_run_where_nothing_can_be_kept(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    started()
    assert not list(folder.iterdir())
    monkeypatch.setattr("tempfile.NamedTemporaryFile", lambda **_: full())
    started()
    assert not list(folder.iterdir())


def test_programs_that_jax_cannot_decompress_are_missing(tmp_path):
    files = ProgramFiles(tmp_path)
    value = zlib.compress(b"a program")
    files.put("key", value)
    (file,) = tmp_path.iterdir()
    assert files.get("key") == value
    other = b"compressed in another way"
    file.write_bytes(hashlib.sha256(other).digest() + other)
    assert files.get("key") is None
    assert files.get("another") is None
