"""Temporary files and directories of a save, locked as long as the saving process lives.

The name of a temporary contains an id of the machine that created it. A later save in the same directory removes it if
it is not locked. For temporaries of other machines, whose locks may be invisible here, and on file systems without
locks, the age decides.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError
from .header import file_error

_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

ABANDONED_SECONDS = 24 * 3600.0
"""Age after which a temporary counts as abandoned if locks cannot tell."""
LOCK_SECONDS = 30.0
"""Limit of the wait for another save that is renaming its files; a process forked meanwhile inherits its lock."""
_STEM_BYTES = 100
_TEMPORARY = re.compile(r"\.(?P<stem>.+?)\.(?:(?P<machine>[0-9a-f]{8})-)?(?P<id>[0-9a-f]{12})\.tmp", re.DOTALL)


@functools.lru_cache(maxsize=1)
def _machine() -> str:
    """Return eight hex digits for this boot of this machine: all containers of a kernel share its locks."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def new_id() -> str:
    """Return a unique id for a save."""
    return secrets.token_hex(6)


def save_id_of(temporary: Path) -> str | None:
    """Return the id of the save that a temporary belongs to, or None for other files."""
    match = _TEMPORARY.fullmatch(temporary.name)
    return match["id"] if match else None


def temporary_name(path: Path, save: str) -> str:
    """Return the temporary name, in the same directory, of the replacement for ``path``."""
    return f".{short_stem(path.name)}.{_machine()}-{save}.tmp"


def short_stem(name: str) -> str:
    """The start of a file's name, short enough that names of temporaries have at most 255 bytes."""
    return os.fsencode(name)[:_STEM_BYTES].decode(sys.getfilesystemencoding(), errors="ignore") or "_"


@dataclass(frozen=True)
class Rights:
    """Mode, owner and group of a file that is replaced; the new file gets the same."""

    mode: int
    owner: int
    group: int

    @classmethod
    def of(cls, *paths: Path) -> Rights | None:
        """Return the rights common to all files that exist, or None if there are no files."""
        found = []
        for path in paths:
            with contextlib.suppress(OSError):
                found.append(path.stat())
        if not found:
            return None
        mode = functools.reduce(int.__and__, (stat.st_mode & 0o777 for stat in found))
        return cls(mode, found[0].st_uid, found[0].st_gid)

    def apply_to(self, handle: int) -> None:
        """Set the rights on an open file, as far as permitted: only root can change the owner."""
        if os.name != "posix":
            return
        for owner in (self.owner, -1):
            with contextlib.suppress(OSError):
                os.fchown(handle, owner, self.group)
                break
        # Another group than the old one gets the rights of others.
        mine = os.fstat(handle).st_gid == self.group
        with contextlib.suppress(OSError):  # a file system without modes; elsewhere the file stays private
            os.fchmod(handle, self.mode if mine else (self.mode & ~0o070) | (self.mode & 0o007) << 3)


@contextlib.contextmanager
def replace_atomically(path: Path, rights: Rights | None = None, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` if the block succeeds, and is removed if it raises.

    The file gets ``rights``, or else the rights of the file that it replaces. ``overwrite``: whether there may be one;
    otherwise raises `CheckpointError`.
    """
    clean(path.parent, path.name)
    rights = rights or Rights.of(path)
    temporary, file = _new_file(path, rights)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if _fcntl is None:
                file.close()  # Windows cannot rename an open file
            # On other systems the file is still locked, so that no other save considers it abandoned.
            _publish(temporary, path, overwrite=overwrite)
    except BaseException:
        remove(temporary)
        raise
    sync(path.parent)


def _publish(temporary: Path, path: Path, *, overwrite: bool) -> None:
    if not overwrite:
        try:
            os.link(temporary, path)  # which replaces nothing, unlike a rename
        except FileExistsError:
            raise appeared_error(path) from None
        except OSError:  # a file system without links
            if os.path.lexists(path):
                raise appeared_error(path) from None
        else:
            temporary.unlink()
            return
    temporary.replace(path)


def appeared_error(path: Path) -> CheckpointError:
    """The error for a target that did not exist before, and must not be replaced."""
    what = "it was created by another process while the checkpoint was written."
    return file_error(path, what, "Choose another target, or pass overwrite=True (--overwrite).")


def _new_file(path: Path, rights: Rights | None) -> tuple[Path, BinaryIO]:
    while True:
        temporary = path.with_name(temporary_name(path, new_id()))
        file = create(temporary, rights)
        if _lock_temporary(file.fileno(), temporary):
            return temporary, file
        file.close()


def create(path: Path, rights: Rights | None) -> BinaryIO:
    """Create a file with ``rights``, or with the default rights of new files."""
    # Created private if rights are given, so that the file is never more accessible than they allow.
    mode = 0o666 if rights is None else 0o600
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, flags, mode), "w+b")
    if rights is not None:
        rights.apply_to(file.fileno())
    return file


@contextlib.contextmanager
def staging(path: Path, save: str, *, mode: int = 0o777) -> Iterator[Path]:
    """Create a directory with a temporary name next to ``path``; if it still exists after the block, it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(temporary_name(path, save))
    try:
        with _new_directory(temporary, mode):
            yield temporary
    finally:
        remove(temporary)


@contextlib.contextmanager
def _new_directory(path: Path, mode: int) -> Iterator[None]:
    path.mkdir(mode=mode)
    if os.name != "posix":
        yield
        return
    handle = _locked_directory(path)
    while handle is None:  # another save removed it as abandoned before it was locked
        path.mkdir(mode=mode)
        handle = _locked_directory(path)
    try:
        yield
    finally:
        os.close(handle)


def _locked_directory(path: Path) -> int | None:
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    if _lock_temporary(handle, path):
        return handle
    os.close(handle)
    return None


def _lock_temporary(handle: int, path: Path) -> bool:
    """Lock an open temporary; returns whether it still exists afterwards. The lock ends with the process."""
    if _fcntl is None:
        return True
    with contextlib.suppress(OSError):  # a file system without locks: the age decides
        _fcntl.flock(handle, _fcntl.LOCK_EX)
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def publish_lock(directory: Path) -> Iterator[bool]:
    """Hold the lock under which saves rename their files in ``directory``; other saves hold it for milliseconds.

    Yields False if there is no lock: the file system has none, or another process did not release it in time.
    """
    handle = _opened(directory)
    if handle is None:
        yield False
        return
    try:
        locked = _acquire(handle)
        while locked and not os.path.samestat(os.fstat(handle), directory.stat()):  # it was exchanged meanwhile
            os.close(handle)
            handle = os.open(directory, os.O_RDONLY)
            locked = _acquire(handle)
        yield locked
    finally:
        os.close(handle)


def _opened(directory: Path) -> int | None:
    try:
        return None if _fcntl is None else os.open(directory, os.O_RDONLY)
    except PermissionError:  # a directory that may be written to, but not listed
        return None


def _acquire(handle: int) -> bool:
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            _fcntl.flock(handle, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
        except OSError:
            return False
        else:
            return True
        time.sleep(0.002)


def clean(directory: Path, stem: str | None = None) -> None:
    """Remove abandoned temporaries in ``directory``: those for ``stem``, or all. Never raises `OSError`."""
    for temporary in temporaries(directory):
        match = _TEMPORARY.fullmatch(temporary.name)
        assert match is not None
        if stem is None or match["stem"] == short_stem(stem):
            with contextlib.suppress(OSError):
                _remove_if_abandoned(temporary, match["machine"])


def temporaries(directory: Path) -> list[Path]:
    """List the temporary files and directories of all saves, abandoned or not."""
    try:
        return [path for path in directory.iterdir() if _TEMPORARY.fullmatch(path.name)]
    except OSError:
        return []


def _remove_if_abandoned(path: Path, machine: str | None) -> None:
    """Remove a temporary if the process that created it has ended, which is so if its lock can be acquired."""
    if machine != _machine() or _fcntl is None:
        _remove_if_old(path)
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        _fcntl.flock(handle, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
        remove(path)
    except BlockingIOError:
        return
    except OSError:
        _remove_if_old(path)
    finally:
        os.close(handle)


def _remove_if_old(path: Path) -> None:
    if time.time() - _last_modified(path) > ABANDONED_SECONDS:
        remove(path)


def _last_modified(path: Path) -> float:
    files = [path, *path.iterdir()] if path.is_dir() else [path]
    return max(file.stat().st_mtime for file in files)


def remove(path: Path) -> None:
    """Remove a file or directory, ignoring errors."""
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(OSError):
            path.chmod(0o700)  # a directory that was replaced may have been read only
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def sync(path: Path) -> None:
    """Flush a directory's entries to disk, as far as its file system and its permissions allow."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
