"""The cache on disk: small JSON records, written atomically, and marks that survive a crash.

Everything here degrades to "no cache" if the directory cannot be written, or if another user could have written to
it; nothing raises.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import forks

_MAX_BYTES = 1 << 20
"""Size limit of a record in bytes; qcore's own take a few hundred."""

_MARKS = "running"
FAILURES = "failures"
"""The kind of records of failures, which ``qcore doctor`` lists; no decision depends on them."""

_MAX_PID = (1 << 31) - 1


def cache_dir() -> Path | None:
    """``QCORE_CACHE_DIR``, or the user's cache directory for qcore. It may not exist yet.

    None if it would be in a home directory and there is none.
    """
    named = os.environ.get("QCORE_CACHE_DIR")
    # Path.expanduser raises without a home directory; this keeps the tilde.
    path = os.path.expanduser(named) if named else _user_cache_dir()  # noqa: PTH111
    return None if path.startswith("~") or "\0" in path else Path(path)


def _user_cache_dir() -> str:
    import platformdirs

    try:
        return platformdirs.user_cache_dir("qcore")
    except RuntimeError:  # newer versions raise, older ones keep the tilde
        return "~"


def files_dir(name: str) -> Path | None:
    """A directory for files of a plugin's own, such as compiled programs; None if it cannot be trusted or made.

    Private to the user, like every directory of the cache.
    """
    root = cache_dir()
    if root is None or why_untrusted():
        return None
    folder = root / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return None if _why_unsafe(folder) else folder


def cache_dir_text() -> str:
    """The cache directory as text for people."""
    return str(cache_dir() or "none: there is no home directory")


def why_untrusted() -> str:
    """Why stored records are not trusted; empty if they are."""
    root = cache_dir()
    if root is None:
        return "there is no home directory for it"
    for folder in (root, *_subdirectories(root)):
        why = _why_unsafe(folder)
        if why:
            return f"{folder} {why}"
    return ""


def _subdirectories(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if path.is_dir()]
    except OSError:
        return []


def _why_unsafe(folder: Path) -> str:
    """Why a directory is not trusted; empty if it is, or if it does not exist."""
    try:
        return _writable_by_others(folder.stat())
    except (OSError, ValueError):
        return ""


def _writable_by_others(info: os.stat_result) -> str:
    """Who else could have written a file or directory, as a clause; empty if no other user could."""
    if not hasattr(os, "geteuid"):
        return ""
    if info.st_uid not in (os.geteuid(), 0):
        return "belongs to another user"
    sticky = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
    return "can be written by everyone" if info.st_mode & stat.S_IWOTH and not sticky else ""


def _path(kind: str, key: str) -> Path | None:
    root = cache_dir()
    # A key may contain a device's name, which may not be encodable text.
    name = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:32]
    return None if root is None else root / kind / f"{name}.json"


def read(kind: str, key: str) -> dict[str, Any] | None:
    """The record stored under ``key``, or None if it is missing, unreadable or untrusted."""
    path = _path(kind, key)
    if path is None or _why_unsafe(path.parents[1]) or _why_unsafe(path.parent):
        return None
    record = _record(path)
    # The key is kept in full, so that a collision or a damaged file reads as "nothing stored".
    return record if record is not None and record.get("key") == key else None


def _record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(_read_own_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _read_own_file(path: Path) -> bytes:
    """The content of our own file. Raises OSError for a pipe, device or link, a huge file, or one of another user."""
    special = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    handle = os.open(path, os.O_RDONLY | special)
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or info.st_size > _MAX_BYTES or _writable_by_others(info):
            raise OSError(f"{path} is not a qcore record")
        return os.read(handle, _MAX_BYTES)
    finally:
        os.close(handle)


def write(kind: str, key: str, **values: Any) -> bool:
    """Store ``values`` under ``key``; returns whether that succeeded. Readers never see a partial record."""
    path, text = _path(kind, key), json.dumps({"key": key, **values})
    if path is None:
        return False
    try:
        for folder in (path.parents[1], path.parent):
            _make_private(folder)
        _write_atomically(path, text)
    except (OSError, ValueError):
        return False
    return True


def _make_private(folder: Path) -> None:
    """Make a directory that no other user can write, whatever the umask. Raises OSError if others can write it."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    elif _why_unsafe(folder):
        raise OSError(f"{folder} {_why_unsafe(folder)}")


def _write_atomically(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def remove(kind: str, key: str) -> None:
    """Delete the record stored under ``key``."""
    path = _path(kind, key)
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            path.unlink()


def records(kind: str) -> list[dict[str, Any]]:
    """Every trusted record of a kind, sorted by file name."""
    root = cache_dir()
    if root is None or _why_unsafe(root) or _why_unsafe(root / kind):
        return []
    try:
        paths = sorted((root / kind).glob("*.json"))
    except OSError:
        return []
    found = (_record(path) for path in paths)
    return [record for record in found if record is not None and isinstance(record.get("key"), str)]


def clear_failures() -> int:
    """Remove the records of plugins that failed, crashed or hung in earlier processes; returns their number."""
    gone, failed = left_over_marks(), records(FAILURES)
    for record in gone:
        remove(_MARKS, record["key"])
    for record in failed:
        remove(FAILURES, record["key"])
    return len(gone) + len(failed)


def left_over_marks() -> list[dict[str, Any]]:
    """The marks left by processes that have ended, and by interrupted steps."""
    return [record for record in records(_MARKS) if is_left_over(record)]


# Marks: records that exist while a step runs that could crash the process.

_lock = forks.Lock()
_running: dict[str, int] = {}


@contextlib.contextmanager
def crash_mark(key: str, **about: Any) -> Iterator[None]:
    """Leave a mark on disk while the block runs; if the process dies inside, the mark stays for `crashed`."""
    set_mark(key, **about)
    try:
        yield
    finally:
        clear_mark(key)


def set_mark(key: str, **about: Any) -> None:
    """Write a mark; ``about`` describes the running step, for `left_over_marks`."""
    with _lock:
        _running[key] = _running.get(key, 0) + 1
        if _running[key] == 1:
            write(_MARKS, key, pid=os.getpid(), started=_own_start(os.getpid()), since=time.time(), **about)


def amend_mark(key: str, **changes: Any) -> None:
    """Update a mark of this process, e.g. with ``ended``: why it remains although the process continues."""
    with _lock:
        found = read(_MARKS, key)
        if found is not None and found.get("pid") == os.getpid():
            write(_MARKS, **{**found, **changes})


def clear_mark(key: str) -> None:
    """Remove a mark of this process; one with ``ended`` remains."""
    with _lock:
        count = _running.get(key, 0) - 1
        if count > 0:
            _running[key] = count
            return
        _running.pop(key, None)
        found = read(_MARKS, key)
        if found is None or (found.get("pid") == os.getpid() and not found.get("ended")):
            remove(_MARKS, key)


def clear_own_marks() -> None:
    """Remove every mark of this process, because it exits cleanly; marks of hung steps remain."""
    for key in list(_running):
        hung = (read(_MARKS, key) or {}).get("hung")
        if hung:
            amend_mark(key, ended=hung)
        _running[key] = 1
        clear_mark(key)


def clear_marks_of(pid: int) -> None:
    """Remove every mark of a process that was killed from outside; marks of hung steps remain."""
    for mark in records(_MARKS):
        if mark.get("pid") == pid and not mark.get("hung"):
            remove(_MARKS, mark["key"])


def crashed(key: str) -> bool:
    """Whether an earlier process died inside ``crash_mark(key)``, or its step was interrupted."""
    mark = read(_MARKS, key)
    return mark is not None and is_left_over(mark)


def left_over(key: str) -> str:
    """How an earlier process ended inside ``crash_mark(key)``, as a predicate; empty if it did not."""
    mark = read(_MARKS, key)
    if mark is None or not is_left_over(mark):
        return ""
    ended = mark.get("ended") or mark.get("hung")
    return ended if isinstance(ended, str) else "ended an earlier process"


def is_left_over(mark: dict[str, Any]) -> bool:
    """Whether a mark belongs to a process that has ended, or to a step that was interrupted."""
    if mark.get("ended"):
        return True
    pid = mark.get("pid")
    if not isinstance(pid, int) or not 0 < pid <= _MAX_PID:
        return False
    # In a container every run may have the same pid: a mark with our pid that we did not set is from an earlier run.
    if pid == os.getpid():
        return mark["key"] not in _running
    return not _alive(pid, mark.get("started"))


def _alive(pid: int, started: object) -> bool:
    if os.name == "nt":  # on Windows os.kill(pid, 0) terminates the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    # The pid may have been reused since.
    return not isinstance(started, str) or _start_of(pid) in ("", started)


def _start_of(pid: int) -> str:
    """When a process started, in ticks since boot, from /proc; empty if that is not available."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return text.rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


_own_start = lru_cache(maxsize=1)(_start_of)

atexit.register(clear_own_marks)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)
