"""The state of an installed distribution's code, for verdicts that must not outlive it.

A release is told by its version. A plugin under development keeps its version while its code changes, so the state of
an editable installation is that of its files: names, sizes and times of change. Nothing is imported or read but
metadata.
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

_MOST_FILES = 20_000
_SKIPPED = {"__pycache__", "build", "dist", "node_modules", "tests"}


@lru_cache(maxsize=256)
def code_state(dist: str) -> str:
    """A text that differs if the code of the distribution ``dist`` does; empty if it is not installed.

    Looked at once per process: what a process has imported stays as it is.
    """
    try:
        found = metadata.distribution(dist)
        root = _source_of(found.read_text("direct_url.json"))
        # An ordinary installation lists its files with their hashes.
        parts = [found.read_text("RECORD") or ""] if root is None else [*_listing(root), *_installed(found)]
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return ""
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def _source_of(direct_url: str | None) -> Path | None:
    """The directory of an editable installation (PEP 610), None for any other."""
    said = json.loads(direct_url or "{}")
    if not (isinstance(said, dict) and isinstance(said.get("dir_info"), dict) and said["dir_info"].get("editable")):
        return None
    return Path(url2pathname(urlsplit(str(said.get("url"))).path))


def _listing(root: Path) -> list[str]:
    files = (_line(entry.path, entry.stat) for entry in _files(root))
    return sorted(line for _, line in zip(range(_MOST_FILES), files, strict=False))


def _files(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not entry.is_dir(follow_symlinks=False):
                yield entry
            elif entry.name not in _SKIPPED:
                yield from _files(entry.path)


def _installed(found: metadata.Distribution) -> Iterator[str]:
    """The files that an editable installation has put beside others: compiled libraries, say."""
    for file in found.files or ():
        if "__pycache__" not in file.parts:
            path = Path(str(found.locate_file(file)))
            yield _line(str(path), path.stat)


def _line(path: str, stat: Callable[[], os.stat_result]) -> str:
    try:
        known = stat()
    except OSError:  # gone in the meantime
        return f"{path} gone"
    return f"{path} {known.st_size} {known.st_mtime_ns}"
