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
        return Path(named).expanduser()
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
    path = _path(kind, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"key": key, **values}, file)
        os.replace(name, path)
    except OSError:
        return False
    return True


def remove(kind: str, key: str) -> None:
    """Forget what is stored under ``key``."""
    with contextlib.suppress(OSError):
        _path(kind, key).unlink()


@contextlib.contextmanager
def crash_mark(key: str) -> Iterator[None]:
    """Leave a mark on disk while the block runs; if the process dies inside, the mark stays for `crashed`."""
    write("running", key, pid=os.getpid())
    try:
        yield
    finally:
        remove("running", key)


def crashed(key: str) -> bool:
    """Whether an earlier process died inside ``crash_mark(key)``."""
    mark = read("running", key)
    return mark is not None and not _alive(int(mark.get("pid", 0)))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
