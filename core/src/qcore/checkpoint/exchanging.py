"""Exchange two directories in one step: what is found under either name is whole at each instant."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

_HERE = -100
"""``AT_FDCWD`` of Linux: paths are relative to the working directory."""
_EXCHANGE = 2
"""``RENAME_EXCHANGE`` of Linux, ``RENAME_SWAP`` of macOS."""


@functools.lru_cache(maxsize=1)
def _system_call() -> Callable[[bytes, bytes], int] | None:
    """The system's function, which returns 0 if it has exchanged two paths; None if there is none."""
    system: str = sys.platform
    try:
        library = ctypes.CDLL(None)
        if system == "linux":
            rename = library.renameat2
            rename.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
            return lambda a, b: int(rename(_HERE, a, _HERE, b, _EXCHANGE))
        if system == "darwin":
            swap = library.renamex_np
            swap.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint)
            return lambda a, b: int(swap(a, b, _EXCHANGE))
    except (AttributeError, OSError, TypeError):  # an old or a different C library
        pass
    return None


def exchange(first: Path, second: Path) -> bool:
    """Exchange two directories; returns whether it was done: not every file system can, and no mount can be moved."""
    call = _system_call()
    return call is not None and call(os.fsencode(first), os.fsencode(second)) == 0


def can_be_replaced(directory: Path) -> bool:
    """Whether a directory created beside ``directory`` may take its place: same file system, writable, same owner."""
    if _system_call() is None:
        return False
    try:
        own, parent = directory.stat(), directory.parent.stat()
    except OSError:
        return False
    mine = os.geteuid() in (0, own.st_uid)
    return mine and own.st_dev == parent.st_dev and os.access(directory.parent, os.W_OK | os.X_OK)


def make_alike(directory: Path, model: Path) -> bool:
    """Give ``directory`` owner, group, mode and extended attributes of ``model``; returns whether that was allowed."""
    wanted, found = model.stat(), directory.stat()
    try:
        if (wanted.st_uid, wanted.st_gid) != (found.st_uid, found.st_gid):
            os.chown(directory, wanted.st_uid, wanted.st_gid)
        shutil.copystat(model, directory)
    except OSError:
        return False
    return True
