from __future__ import annotations

import os
import subprocess
import sys

import pytest

from qcore import _cache


def test_directory_is_the_named_one(monkeypatch, tmp_path):
    monkeypatch.setenv("QCORE_CACHE_DIR", str(tmp_path / "here"))
    assert _cache.cache_dir() == tmp_path / "here"
    monkeypatch.setenv("QCORE_CACHE_DIR", "~/somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _cache.cache_dir() == tmp_path / "somewhere"


def test_directory_of_the_user_otherwise(monkeypatch):
    monkeypatch.delenv("QCORE_CACHE_DIR")
    assert _cache.cache_dir().name == "qcore"


def test_written_records_are_read_back():
    assert _cache.read("kind", "key") is None
    assert _cache.write("kind", "key", value=[1, 2])
    assert _cache.read("kind", "key") == {"key": "key", "value": [1, 2]}
    assert _cache.read("other", "key") is None
    _cache.remove("kind", "key")
    _cache.remove("kind", "key")
    assert _cache.read("kind", "key") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"key": "another"}', '{"value": 1}', "\udcff"])
def test_damaged_records_read_as_nothing(text):
    assert _cache.write("kind", "key", value=1)
    _cache._path("kind", "key").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert _cache.read("kind", "key") is None


def test_a_directory_that_cannot_be_made_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("QCORE_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert not _cache.write("kind", "key", value=1)
    assert _cache.read("kind", "key") is None
    with _cache.crash_mark("work"):
        assert not _cache.crashed("work")


def test_a_failed_write_leaves_nothing(monkeypatch):
    def full(self, target):
        raise OSError("disk full")

    assert _cache.write("kind", "key", value=1)
    monkeypatch.setattr("pathlib.Path.replace", full)
    assert not _cache.write("kind", "key", value=2)
    assert [path.suffix for path in _cache._path("kind", "key").parent.iterdir()] == [".json"]
    assert _cache.read("kind", "key")["value"] == 1


def test_a_mark_goes_when_the_block_ends():
    with pytest.raises(ValueError, match="x"), _cache.crash_mark("work"):  # noqa: PT012 - the block is the subject
        assert _cache.read("running", "work")["pid"] == os.getpid()
        assert not _cache.crashed("work")
        raise ValueError("x")
    assert _cache.read("running", "work") is None
    assert not _cache.crashed("work")


def test_a_process_that_dies_inside_leaves_its_mark():
    code = "import os\nfrom qcore import _cache\nwith _cache.crash_mark('work'):\n    os._exit(3)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 3
    assert _cache.crashed("work")
    with _cache.crash_mark("work"):
        pass
    assert not _cache.crashed("work")


def test_a_mark_with_our_own_pid_that_we_did_not_set_is_an_earlier_run():
    _cache.write("running", "work", pid=os.getpid())
    assert _cache.crashed("work")


def test_a_mark_of_a_living_process_is_no_crash():
    _cache.write("running", "work", pid=os.getppid())
    assert not _cache.crashed("work")


@pytest.mark.parametrize("pid", [0, -1, None, "x", 1.5])
def test_a_damaged_mark_is_no_crash(pid):
    _cache.write("running", "work", pid=pid)
    assert not _cache.crashed("work")
