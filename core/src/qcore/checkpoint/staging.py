"""What a save makes before it takes its place: temporary files and directories that are locked while their saver lives.

The name of a temporary holds which machine made it. Whoever saves next to it later removes it if nobody holds its lock;
on another machine, whose locks may not be seen here, and on file systems without locks its age decides.
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
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

ABANDONED_SECONDS = 24 * 3600.0
"""Age after which a temporary is taken for a dead saver's where no lock tells."""
LOCK_SECONDS = 30.0
"""How long a save waits for another that is about to rename its files: a process forked just then keeps its lock."""
_TEMPORARY = re.compile(r"\.(?P<stem>.+?)\.(?:(?P<machine>[0-9a-f]{8})-)?(?P<id>[0-9a-f]{12})\.tmp")


@functools.lru_cache(maxsize=1)
def _machine() -> str:
    """Eight digits for this start of this machine: locks are seen within it, whatever a container calls itself."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def new_id() -> str:
    """Names one save among all."""
    return secrets.token_hex(6)


def save_id_of(temporary: Path) -> str | None:
    """Which save a file or directory is the temporary of; None if it is none."""
    match = _TEMPORARY.fullmatch(temporary.name)
    return match["id"] if match else None


def temporary_name(path: Path, save: str) -> str:
    """A name beside ``path`` for what is to take its place."""
    return f".{path.name[:100]}.{_machine()}-{save}.tmp"


@dataclass(frozen=True)
class Rights:
    """Who may do what with a file that is replaced: the file that takes its place keeps it."""

    mode: int
    owner: int
    group: int

    @classmethod
    def of(cls, *paths: Path) -> Rights | None:
        """Those of the files that exist; what one of them denies is denied. None where there is none."""
        found = []
        for path in paths:
            with contextlib.suppress(OSError):
                found.append(path.stat())
        if not found:
            return None
        mode = functools.reduce(int.__and__, (stat.st_mode & 0o777 for stat in found))
        return cls(mode, found[0].st_uid, found[0].st_gid)

    def apply_to(self, handle: int) -> None:
        """Set them on an open file. Only root can give a file away; others keep what they can."""
        if os.name != "posix":
            return
        for owner in (self.owner, -1):
            with contextlib.suppress(OSError):
                os.fchown(handle, owner, self.group)
                break
        # A group that is not the old one gets what everybody has.
        mine = os.fstat(handle).st_gid == self.group
        os.fchmod(handle, self.mode if mine else (self.mode & ~0o070) | (self.mode & 0o007) << 3)


@contextlib.contextmanager
def replace_atomically(path: Path, rights: Rights | None = None) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends well, and vanishes when it does not.

    It has the rights of the file that it replaces, or ``rights``.
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
                file.close()  # Windows renames no open file
            # Elsewhere it is still locked: nobody takes the finished file for an abandoned one.
            temporary.replace(path)
    except BaseException:
        remove(temporary)
        raise
    sync(path.parent)


def _new_file(path: Path, rights: Rights | None) -> tuple[Path, BinaryIO]:
    while True:
        temporary = path.with_name(temporary_name(path, new_id()))
        file = create(temporary, rights)
        if _lock_temporary(file.fileno(), temporary):
            return temporary, file
        file.close()


def create(path: Path, rights: Rights | None) -> BinaryIO:
    """A new file with these rights, or those that new files have."""
    # What others could not read before they cannot read in between either.
    mode = 0o666 if rights is None else 0o600
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, flags, mode), "w+b")
    if rights is not None:
        rights.apply_to(file.fileno())
    return file


@contextlib.contextmanager
def staging(path: Path, save: str, *, mode: int = 0o777) -> Iterator[Path]:
    """A new directory, under a temporary name beside ``path``; what is left of it at the end is removed."""
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
    while handle is None:  # taken for abandoned in the moment before it was locked
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
    """Lock an open temporary; whether it is still there afterwards. The lock goes when the process does."""
    if _fcntl is None:
        return True
    with contextlib.suppress(OSError):  # not on every file system: then the age counts
        _fcntl.flock(handle, _fcntl.LOCK_EX)
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def publish_lock(directory: Path) -> Iterator[bool]:
    """Wait until no other save publishes in ``directory``, which takes milliseconds.

    Gives False where there is no lock to be had: the file system knows none, or somebody does not let go.
    """
    if _fcntl is None:
        yield False
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        yield _acquire(handle)
    finally:
        os.close(handle)


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
    """Remove what dead savers left in ``directory``: for files called ``stem``, or for all. Never raises `OSError`."""
    for temporary in temporaries(directory):
        match = _TEMPORARY.fullmatch(temporary.name)
        assert match is not None
        if stem is None or match["stem"] == stem[:100]:
            with contextlib.suppress(OSError):
                _remove_if_abandoned(temporary, match["machine"])


def temporaries(directory: Path) -> list[Path]:
    """The temporary files and directories of saves, alive or not."""
    try:
        return [path for path in directory.iterdir() if _TEMPORARY.fullmatch(path.name)]
    except OSError:
        return []


def _remove_if_abandoned(path: Path, machine: str | None) -> None:
    """Remove a temporary whose saver is dead, holding the lock that the saver would hold."""
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
    """Remove a file or directory as far as the system lets us."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def sync(path: Path) -> None:
    """Bring the names in a directory to disk."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
