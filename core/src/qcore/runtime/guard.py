"""The guard around each step of a plugin: import, registration, probe, hook, pack, first call.

Every exception of a step becomes a `StepError`, except for the user's KeyboardInterrupt. A mark on disk exists while
the step runs, so that the next process skips a step that crashed or hung; a watchdog warns with the plugin's name if a
step takes too long; and changes to the state of the process are undone (`preserved_state`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from ..errors import QcoreWarning
from . import disk_cache, forks, plain_text, process_state

SECONDS = 10.0
"""A longer step causes a warning; if the user then interrupts it, the next run skips it."""

FIRST_CALL_SECONDS = 60.0
"""The limit for steps that may compile a kernel."""

BUILTIN = "torch"
"""The name of the built-in fallback plugin."""

_HANDS_BACK = "it calls qcore for the same request, which qcore hands to it again: compute the result in the kernel"
_TERMINATING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_POLL = 1.0


class Plugin(Protocol):
    """The identity of the plugin that a step belongs to."""

    @property
    def name(self) -> str: ...
    @property
    def dist(self) -> str: ...
    @property
    def version(self) -> str: ...


class StepError(Exception):
    """A step of a plugin raised ``cause``, or returned an invalid value; ``reason`` describes it."""

    def __init__(self, reason: str, cause: BaseException | None = None) -> None:
        super().__init__(reason)
        self.reason, self.cause = reason, cause

    def describe(self, step: str) -> str:
        """The reason as a clause about ``step``, e.g. ``"pack raised RuntimeError: no memory"``."""
        return self.reason if self.cause is None else f"{step} raised {self.reason}"


class Step:
    """One step of one plugin, while it runs."""

    def __init__(self, plugin: Plugin, doing: str, key: str, seconds: float) -> None:
        self.plugin, self.doing, self.key, self.seconds = plugin, doing, key, seconds
        self.since = time.monotonic()
        self.warned = False

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.since

    def begin(self) -> None:
        who = {"plugin": self.plugin.name, "dist": self.plugin.dist, "version": self.plugin.version}
        disk_cache.set_mark(self.key, doing=self.doing, **who)

    def end(self, error: BaseException | None) -> None:
        if isinstance(error, KeyboardInterrupt) and self.elapsed >= self.seconds:
            ended = f"was interrupted after {self.elapsed:.0f} seconds in an earlier process"
            disk_cache.amend_mark(self.key, ended=ended)
        disk_cache.clear_mark(self.key)
        if self.warned:
            note_failure(self.plugin, self.key, f"{self.doing} took {self.elapsed:.0f} seconds", slow=True)

    def warn_slow(self) -> None:
        """Warn that the step is slow, and record it in the mark as the reason if the process ends now."""
        self.warned = True
        disk_cache.amend_mark(self.key, hung=f"took over {self.seconds:g} seconds in an earlier process")
        _warn(
            f"qcore plugin {self.plugin.name!r} ({self.plugin.dist} {self.plugin.version}) has spent over "
            f"{self.seconds:g} seconds in {self.doing}.\nIf you interrupt it, the next run skips this step; "
            f"QCORE_DISABLE={self.plugin.name} disables the plugin permanently."
        )


def note_failure(plugin: Plugin, key: str, text: str, *, slow: bool = False) -> None:
    """Write a record that ``qcore doctor`` lists."""
    about = {"plugin": plugin.name, "dist": plugin.dist, "version": plugin.version, "since": time.time()}
    disk_cache.write(disk_cache.FAILURES, key, text=text, slow=slow, **about)


_passed: set[str] = set()
_state_changers: set[str] = set()
_MAX_PASSED = 16384


def mark_key(stage: str, plugin: Plugin, what: object = "") -> str:
    """The key of the mark of a step; ``what``: its subject, e.g. the signature of a request."""
    return f"{stage} {plugin.name} {plugin.dist} {plugin.version}" + (f" {what}" if what else "")


def has_passed(key: str, size: str = "", **_: Any) -> bool:
    """Whether a step of this ``key`` and ``size`` has succeeded in this process."""
    return f"{key} {size}" in _passed


@contextmanager
def guarded(plugin: Plugin, doing: str, key: str, seconds: float | None = None, size: str = "") -> Iterator[None]:
    """Run a step; its exceptions become `StepError`.

    ``doing``: the step in words; ``key``: of its mark, see `mark_key`; ``seconds``: until it counts as hung, default
    `SECONDS`; ``size``: each size of a key is a step of its own. A step that has succeeded leaves no more marks.
    """
    try:
        if plugin.name == BUILTIN:
            yield
            return
        with _not_within_itself(key), _step(plugin, doing, key, seconds, size):
            yield
    except (KeyboardInterrupt, StepError):
        raise
    except BaseException as error:
        if error is _handler_error.error:
            raise
        raise StepError(plain_text.of_error(error), error) from error


@contextmanager
def _step(plugin: Plugin, doing: str, key: str, seconds: float | None, size: str) -> Iterator[None]:
    if has_passed(key, size) and plugin.name not in _state_changers:
        yield
        return
    with _watched(Step(plugin, doing, key, SECONDS if seconds is None else seconds)):
        yield
    _remember(f"{key} {size}")


class _Running(threading.local):
    """The keys of the steps that run in this thread, and of those that were entered again meanwhile."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.again: set[str] = set()


_running = _Running()


@contextmanager
def _not_within_itself(key: str) -> Iterator[None]:
    """Fail a step that enters itself again, which a kernel does that calls qcore for its own request: without end."""
    if key in _running.keys:
        _running.again.add(key)
        raise StepError(_HANDS_BACK)
    _running.keys.add(key)
    try:
        yield
        if key in _running.again:
            raise StepError(_HANDS_BACK)
    finally:
        _running.keys.discard(key)
        _running.again.discard(key)


@contextmanager
def preserved_state() -> Iterator[None]:
    """Undo changes to the state of the process if any plugin is known to make some: for calls outside of steps."""
    restore = process_state.snapshot() if _state_changers else list
    try:
        yield
    finally:
        restore()


@contextmanager
def _watched(step: Step) -> Iterator[None]:
    error: BaseException | None = None
    restore = process_state.snapshot()
    try:
        step.begin()
        _watchdog.add(step)
        with _clean_termination():
            yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        _watchdog.remove(step)
        step.end(error)
        changed = restore()
        _warn_state_changed(step, changed)


def _remember(key: str) -> None:
    if len(_passed) >= _MAX_PASSED:
        _passed.clear()
    _passed.add(key)


def _warn_state_changed(step: Step, changed: list[str]) -> None:
    names = [name for name in changed if name != process_state.SEED]
    if changed and step.plugin.name not in _state_changers:
        _state_changers.add(step.plugin.name)
        if names:
            _warn(
                f"qcore plugin {step.plugin.name!r} ({step.plugin.dist} {step.plugin.version}) changed process state "
                f"in {step.doing}: {', '.join(names)}.\nThe changes were undone."
            )


def _warn(text: str) -> None:
    try:
        warnings.warn(text, QcoreWarning, stacklevel=3)
    except QcoreWarning:
        # Warnings are errors here; raised in a guard or in the watchdog's thread, it would hit unrelated code.
        if sys.stderr is not None:  # a process without a console has none
            sys.stderr.write(f"{text}\n")


# Terminating signals: a kernel that runs when one arrives is not at fault.


class _HandlerError(threading.local):
    """An exception of the user's signal handler in this thread, which no plugin caused."""

    error: BaseException | None = None


_handler_error = _HandlerError()
_handlers: dict[int, Any] = {}


@contextmanager
def _clean_termination() -> Iterator[None]:
    """Remove marks before SIGTERM and SIGHUP take effect."""
    if _handlers or threading.current_thread() is not threading.main_thread():
        yield
        return
    for number in _TERMINATING:
        handler = signal.getsignal(number)
        if handler is not None and handler is not signal.SIG_IGN:
            _handlers[number] = handler
            signal.signal(number, _terminate)
    try:
        yield
    finally:
        _restore_handlers()


def _restore_handlers() -> None:
    while _handlers:
        number, handler = _handlers.popitem()
        signal.signal(number, handler)


def _terminate(number: int, frame: FrameType | None) -> None:
    handler = _handlers.get(number, signal.SIG_DFL)
    if callable(handler):
        try:
            handler(number, frame)
        except BaseException as error:
            _handler_error.error = error
            raise
        return
    disk_cache.clear_own_marks()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _restore_default_actions() -> None:
    """Restore immediate termination by signals: Python's handlers would wait for hung native code."""
    defaults = [number for number, handler in list(_handlers.items()) if handler is signal.SIG_DFL]
    # Python allows this in the main thread only, which restores its handlers after the step.
    with contextlib.suppress(Exception):
        libc = ctypes.CDLL(None)
        for number in defaults:
            libc.signal(int(number), 0)


# The watchdog.


class _Watchdog:
    """A thread that checks running steps once a second while there are any."""

    def __init__(self) -> None:
        self._lock = forks.Lock()
        self._steps: dict[int, Step] = {}
        self._thread: threading.Thread | None = None

    def add(self, step: Step) -> None:
        with self._lock:
            self._steps[id(step)] = step
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="qcore-watchdog", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread can start at interpreter shutdown
                    self._thread.start()

    def remove(self, step: Step) -> None:
        with self._lock:
            self._steps.pop(id(step), None)

    def forget(self) -> None:
        """Reset in a forked child, which has none of the threads."""
        self._steps, self._thread = {}, None

    def _run(self) -> None:
        while True:
            with self._lock:
                running = list(self._steps.values())
                if not running:
                    self._thread = None
                    return
            for step in running:
                if not step.warned and step.elapsed >= step.seconds:
                    step.warn_slow()
                    _restore_default_actions()
            time.sleep(min([_POLL, *(max(0.01, s.seconds - s.elapsed) for s in running if not s.warned)]))


_watchdog = _Watchdog()


def _in_child() -> None:
    _watchdog.forget()
    with contextlib.suppress(ValueError):
        _restore_handlers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
