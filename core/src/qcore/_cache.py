"""The cache on disk: small JSON records, written atomically, and marks that outlive a crash.

Everything here degrades to "no cache" where the directory cannot be written; nothing raises.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """``QCORE_CACHE_DIR``, or the user's cache directory for qcore. It may not exist yet."""
    named = os.environ.get("QCORE_CACHE_DIR")
    if named:
        return Path(os.path.expanduser(named))  # noqa: PTH111 - Path.expanduser raises where there is no home
    import platformdirs

    return Path(platformdirs.user_cache_dir("qcore"))


def _path(kind: str, key: str) -> Path:
    return cache_dir() / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def read(kind: str, key: str) -> dict[str, Any] | None:
    """The record stored under ``key``, or None where there is none or it cannot be read."""
    try:
        record = json.loads(_path(kind, key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    # The key is kept in full, so that a collision or a damaged file reads as "nothing stored".
    return record if isinstance(record, dict) and record.get("key") == key else None


def write(kind: str, key: str, **values: Any) -> bool:
    """Store ``values`` under ``key``; returns whether that worked. Readers never see half a record."""
    path, text = _path(kind, key), json.dumps({"key": key, **values})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text)
    except OSError:
        return False
    return True


def _replace(path: Path, text: str) -> None:
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
    """Forget what is stored under ``key``."""
    with contextlib.suppress(OSError):
        _path(kind, key).unlink()


@contextlib.contextmanager
def crash_mark(key: str) -> Iterator[None]:
    """Leave a mark on disk while the block runs; if the process dies inside, the mark stays for `crashed`."""
    _running.add(key)
    write("running", key, pid=os.getpid())
    try:
        yield
    finally:
        _running.discard(key)
        remove("running", key)


_running: set[str] = set()


def crashed(key: str) -> bool:
    """Whether an earlier process died inside ``crash_mark(key)``."""
    mark = read("running", key)
    pid = mark.get("pid") if mark else None
    if not isinstance(pid, int) or pid < 1:
        return False
    # In a container every run may have the same pid: a mark of ours that we did not set is that of an earlier one.
    return key not in _running if pid == os.getpid() else not _alive(pid)


def _alive(pid: int) -> bool:
    if os.name == "nt":  # there os.kill(pid, 0) is no question: it ends the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
