from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from qcore.runtime import disk_cache


def test_directory_is_the_named_one(monkeypatch, tmp_path):
    monkeypatch.setenv("QCORE_CACHE_DIR", str(tmp_path / "here"))
    assert disk_cache.cache_dir() == tmp_path / "here"
    monkeypatch.setenv("QCORE_CACHE_DIR", "~/somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk_cache.cache_dir() == tmp_path / "somewhere"


def test_directory_of_the_user_otherwise(monkeypatch):
    monkeypatch.delenv("QCORE_CACHE_DIR")
    assert disk_cache.cache_dir().name == "qcore"


def test_written_records_are_read_back():
    assert disk_cache.read("kind", "key") is None
    assert disk_cache.write("kind", "key", value=[1, 2])
    assert disk_cache.read("kind", "key") == {"key": "key", "value": [1, 2]}
    assert disk_cache.read("other", "key") is None
    disk_cache.remove("kind", "key")
    disk_cache.remove("kind", "key")
    assert disk_cache.read("kind", "key") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"key": "another"}', '{"value": 1}', "\udcff"])
def test_damaged_records_read_as_nothing(text):
    assert disk_cache.write("kind", "key", value=1)
    disk_cache._path("kind", "key").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert disk_cache.read("kind", "key") is None


def test_a_directory_that_cannot_be_made_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("QCORE_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert not disk_cache.write("kind", "key", value=1)
    assert disk_cache.read("kind", "key") is None
    with disk_cache.crash_mark("work"):
        assert not disk_cache.crashed("work")


def test_a_failed_write_leaves_nothing(monkeypatch):
    def full(self, target):
        raise OSError("disk full")

    assert disk_cache.write("kind", "key", value=1)
    monkeypatch.setattr("pathlib.Path.replace", full)
    assert not disk_cache.write("kind", "key", value=2)
    assert [path.suffix for path in disk_cache._path("kind", "key").parent.iterdir()] == [".json"]
    assert disk_cache.read("kind", "key")["value"] == 1


def test_a_mark_goes_when_the_block_ends():
    with pytest.raises(ValueError, match="x"), disk_cache.crash_mark("work"):  # noqa: PT012 - the block is the subject
        assert disk_cache.read("running", "work")["pid"] == os.getpid()
        assert not disk_cache.crashed("work")
        raise ValueError("x")
    assert disk_cache.read("running", "work") is None
    assert not disk_cache.crashed("work")


def test_a_process_that_dies_inside_leaves_its_mark():
    code = "import os\nfrom qcore.runtime import disk_cache\nwith disk_cache.crash_mark('work'):\n    os._exit(3)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 3
    assert disk_cache.crashed("work")
    with disk_cache.crash_mark("work"):
        pass
    assert not disk_cache.crashed("work")


def test_a_foreign_mark_with_our_own_pid_is_an_earlier_run():
    disk_cache.write("running", "work", pid=os.getpid())
    assert disk_cache.crashed("work")


def test_a_mark_of_a_living_process_is_no_crash():
    disk_cache.write("running", "work", pid=os.getppid())
    assert not disk_cache.crashed("work")


@pytest.mark.parametrize("pid", [0, -1, None, "x", 1.5, 10**30, True])
def test_a_damaged_mark_is_no_crash(pid):
    disk_cache.write("running", "work", pid=pid)
    assert not disk_cache.crashed("work")


def _in_place_of_a_record(make):
    assert disk_cache.write("kind", "key", value=1)
    path = disk_cache._path("kind", "key")
    path.unlink()
    make(path)
    start = time.perf_counter()
    found = disk_cache.read("kind", "key")
    assert time.perf_counter() - start < 2
    return found


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
def test_what_is_no_file_reads_as_nothing(tmp_path):
    target = tmp_path / "elsewhere.json"
    target.write_text('{"key": "key", "value": 2}')
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(target)):
        assert _in_place_of_a_record(make) is None
    assert _in_place_of_a_record(lambda path: path.mkdir()) is None
    assert not disk_cache.write("kind", "key", value=1)
    disk_cache.remove("kind", "key")


@pytest.mark.parametrize("text", ["[" * 200_000, '{"key": ' * 50_000, '{"key": "key", "value": ' + "9" * 10_000 + "}"])
def test_hostile_json_reads_as_nothing(text):
    assert _in_place_of_a_record(lambda path: path.write_text(text)) is None


def test_a_giant_is_not_read():
    def giant(path):
        with path.open("wb") as file:
            file.truncate(1 << 40)

    assert _in_place_of_a_record(giant) is None


needs_users = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no users on this system")


@needs_users
def test_what_everybody_can_write_is_not_believed():
    assert disk_cache.write("kind", "key", value=1)
    path = disk_cache._path("kind", "key")
    for each in (path, path.parent, path.parents[1]):
        mode = each.stat().st_mode
        each.chmod(mode | 0o002)
        assert disk_cache.read("kind", "key") is None
        assert each == path or "can be written by everyone" in disk_cache.why_untrusted()
        assert each == path or not disk_cache.write("kind", "other", value=1)
        each.chmod(mode)
        assert disk_cache.read("kind", "key")
    assert not disk_cache.why_untrusted()


@needs_users
def test_what_another_user_owns_is_not_believed(monkeypatch):
    assert disk_cache.write("kind", "key", value=1)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    if own:
        assert disk_cache.read("kind", "key") is None
        assert "belongs to another user" in disk_cache.why_untrusted()
        return
    assert disk_cache.read("kind", "key")  # the administrator's own
    path = disk_cache._path("kind", "key")
    for each in (path, path.parent):
        os.chown(each, 12345, -1)
        assert disk_cache.read("kind", "key") is None
        os.chown(each, 0, -1)


@needs_users
def test_what_is_made_is_nobody_elses_whatever_the_umask(monkeypatch, tmp_path):
    monkeypatch.setenv("QCORE_CACHE_DIR", str(tmp_path / "new"))
    before = os.umask(0)
    try:
        assert disk_cache.write("kind", "key", value=1)
    finally:
        os.umask(before)
    assert disk_cache.read("kind", "key")


def test_without_a_home_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("QCORE_CACHE_DIR")
    for name in ("HOME", "XDG_CACHE_HOME", "USERPROFILE", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where there is no passwd entry
    assert disk_cache.cache_dir() is None
    assert not disk_cache.write("kind", "key", value=1)
    assert disk_cache.read("kind", "key") is None
    with disk_cache.crash_mark("work"):
        assert not disk_cache.crashed("work")
    assert disk_cache.records("kind") == []
    assert "no home directory" in disk_cache.why_untrusted()
    assert not list(tmp_path.iterdir())


def test_keys_of_any_text():
    assert disk_cache.write("kind", "a\udcffb", value=1)
    assert disk_cache.read("kind", "a\udcffb")["value"] == 1


def test_a_mark_whose_pid_another_process_has_got_is_a_crash():
    pid = os.getppid()
    if not disk_cache._start_of(pid):
        pytest.skip("this system does not tell when a process started")
    disk_cache.write("running", "work", pid=pid, started=disk_cache._start_of(pid))
    assert not disk_cache.crashed("work")
    disk_cache.write("running", "work", pid=pid, started="1")
    assert disk_cache.crashed("work")


def test_two_threads_at_the_same_work_have_one_mark():
    with disk_cache.crash_mark("work"):
        with disk_cache.crash_mark("work"):
            pass
        assert disk_cache.read("running", "work")
    assert not disk_cache.read("running", "work")


def test_a_mark_of_another_process_is_left_to_it():
    with disk_cache.crash_mark("work"):
        disk_cache.write("running", "work", pid=os.getppid())
    assert disk_cache.read("running", "work")


def test_the_end_of_a_process_takes_its_marks_away():
    code = "import sys\nfrom qcore.runtime import disk_cache\ndisk_cache.set_mark('work')\nsys.exit(3)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 3
    assert not disk_cache.read("running", "work")
