"""Locks that are released in a forked child, since the threads that held them do not exist there.

A fork waits up to `WAIT_SECONDS` for the holders of ``awaited`` locks, so that the child inherits a consistent state,
including modules under import. If the wait times out, because a plugin hangs or forks itself, the child first runs the
repairs registered with `after_broken_fork`.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WAIT_SECONDS = 5.0
"""The total time that a fork waits for awaited locks."""

_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
_awaited: list[weakref.ref[Lock]] = []
_repairs: list[Callable[[], object]] = []


class _ThreadState(threading.local):
    """Per-thread state: nesting of `waited_for` blocks, and the locks ``held`` across a fork."""

    waited_for = 0

    def __init__(self) -> None:
        self.held: list[Lock] = []


_thread = _ThreadState()


class Lock:
    """A reentrant lock. ``awaited``: a fork waits for it; create inner locks before outer ones."""

    def __init__(self, *, awaited: bool = False) -> None:
        self.renew()
        _locks.add(self)
        if awaited:
            _awaited.append(weakref.ref(self, _awaited.remove))

    def renew(self) -> None:
        """Replace the lock by a free one."""
        self._lock: Any = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()

    def acquire(self, seconds: float) -> bool:
        """Acquire the lock; returns False if that takes over ``seconds``."""
        return bool(self._lock.acquire(timeout=seconds))

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        return bool(self._lock._is_owned())  # noqa: SLF001 - as threading.Condition does


@contextmanager
def waited_for() -> Iterator[None]:
    """A block in a thread that another thread waits for while holding locks: a fork in it must not wait for them."""
    _thread.waited_for += 1
    try:
        yield
    finally:
        _thread.waited_for -= 1


def after_broken_fork(repair: Callable[[], object]) -> None:
    """Register ``repair`` to run in a child that was forked while another thread held an awaited lock."""
    _repairs.append(repair)


def _before() -> None:
    deadline = time.monotonic() + (0.0 if _thread.waited_for else WAIT_SECONDS)
    # Outer locks first, in the order in which other code acquires them.
    for lock in filter(None, (ref() for ref in reversed(_awaited))):
        if not lock.acquire(max(0.0, deadline - time.monotonic())):
            break
        _thread.held.append(lock)


def _release() -> None:
    while _thread.held:
        _thread.held.pop().release()


def _in_child() -> None:
    complete = len(_thread.held) == len(_awaited)
    _release()
    for lock in list(_locks):
        # The forking thread survives in the child and releases its own locks there.
        if not lock.is_mine():
            lock.renew()
    if not complete:
        for repair in _repairs:
            repair()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_release, after_in_child=_in_child)
