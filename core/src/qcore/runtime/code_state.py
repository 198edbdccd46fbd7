"""A fingerprint of an installed distribution's code, to invalidate verdicts when the code changes.

A release is identified by its RECORD. A plugin under development keeps its version while its code changes, so an
editable installation is identified by the names, sizes and modification times of its files. Only metadata is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

_MAX_FILES = 20_000
_SKIPPED = {"__pycache__", "build", "dist", "node_modules", "tests"}


@lru_cache(maxsize=256)
def code_state(dist: str) -> str:
    """A hash that changes with the code of the distribution ``dist``; empty if it is not installed.

    Computed once per process, since imported code does not change.
    """
    try:
        found = metadata.distribution(dist)
        root = _source_dir(found.read_text("direct_url.json"))
        # An ordinary installation lists its files with their hashes.
        lines = [found.read_text("RECORD") or ""] if root is None else [*_source_lines(root), *_installed_lines(found)]
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return ""
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


def _source_dir(direct_url: str | None) -> Path | None:
    """The directory of an editable installation (PEP 610), None for any other."""
    origin = json.loads(direct_url or "{}")
    if not (
        isinstance(origin, dict) and isinstance(origin.get("dir_info"), dict) and origin["dir_info"].get("editable")
    ):
        return None
    return Path(url2pathname(urlsplit(str(origin.get("url"))).path))


def _source_lines(root: Path) -> list[str]:
    files = (_stat_line(entry.path, entry.stat) for entry in _files(root))
    return sorted(line for _, line in zip(range(_MAX_FILES), files, strict=False))


def _files(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not entry.is_dir(follow_symlinks=False):
                yield entry
            elif entry.name not in _SKIPPED:
                yield from _files(entry.path)


def _installed_lines(found: metadata.Distribution) -> Iterator[str]:
    """The files that an editable installation has put into site-packages, such as compiled libraries."""
    for file in found.files or ():
        if "__pycache__" not in file.parts:
            path = Path(str(found.locate_file(file)))
            yield _stat_line(str(path), path.stat)


def _stat_line(path: str, stat: Callable[[], os.stat_result]) -> str:
    try:
        info = stat()
    except OSError:  # deleted in the meantime
        return f"{path} gone"
    return f"{path} {info.st_size} {info.st_mtime_ns}"
