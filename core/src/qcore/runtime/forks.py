"""Locks that a fork leaves free in the child, where the threads that held them are gone.

A fork waits a moment for work behind a lock made with ``awaited``: what the child gets is then whole, modules that
were being imported included. Where the wait is in vain, because a plugin hangs or is itself what forks, the child
starts with what `after_broken_fork` puts right.
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
"""How long a fork waits, in all, for work behind locks that are awaited."""

_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
_awaited: list[weakref.ref[Lock]] = []
_repairs: list[Callable[[], object]] = []


class _Thread(threading.local):
    """What this thread does: ``waited_for`` by another one, and the locks that it ``held`` over a fork."""

    waited_for = 0

    def __init__(self) -> None:
        self.held: list[Lock] = []


_here = _Thread()


class Lock:
    """A reentrant lock. ``awaited``: a fork waits for it; make those in the order inner before outer."""

    def __init__(self, *, awaited: bool = False) -> None:
        self.renew()
        _locks.add(self)
        if awaited:
            _awaited.append(weakref.ref(self, _awaited.remove))

    def renew(self) -> None:
        """Forget who holds it."""
        self._lock: Any = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()

    def acquire(self, seconds: float) -> bool:
        """Whether it could be had within ``seconds``."""
        return bool(self._lock.acquire(timeout=seconds))

    def release(self) -> None:
        """Give it back."""
        self._lock.release()

    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return bool(self._lock._is_owned())  # noqa: SLF001 - as threading.Condition asks


@contextmanager
def waited_for() -> Iterator[None]:
    """A block in a thread that another one waits for, locks in hand: a fork in here does not wait for those."""
    _here.waited_for += 1
    try:
        yield
    finally:
        _here.waited_for -= 1


def after_broken_fork(repair: Callable[[], object]) -> None:
    """Have ``repair`` run in a child that was forked while another thread was at work behind an awaited lock."""
    _repairs.append(repair)


def _before() -> None:
    deadline = time.monotonic() + (0.0 if _here.waited_for else WAIT_SECONDS)
    # Outer locks first, as the work behind them takes them.
    for lock in filter(None, (ref() for ref in reversed(_awaited))):
        if not lock.acquire(max(0.0, deadline - time.monotonic())):
            break
        _here.held.append(lock)


def _release() -> None:
    while _here.held:
        _here.held.pop().release()


def _in_child() -> None:
    whole = len(_here.held) == len(_awaited)
    _release()
    for lock in list(_locks):
        # What the thread that forked holds it will release itself, in the child too.
        if not lock.is_mine():
            lock.renew()
    if not whole:
        for repair in _repairs:
            repair()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_release, after_in_child=_in_child)
