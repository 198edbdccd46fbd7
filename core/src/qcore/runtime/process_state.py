"""Process state that a plugin must not change: torch's defaults, warnings, signals, seeds.

A plugin's code runs in the user's process. Its changes during a guarded step are undone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import locale
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _device

# The public function converts to enums, which takes fifty times as long.
_handler: Callable[[int], Any] = importlib.import_module("_signal").getsignal
# Torch has no public API for the state of its dispatcher.
_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001


@dataclass(frozen=True)
class _StateItem:
    """One item of the state: ``read`` returns a comparable value, ``write`` restores it."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


def snapshot() -> Callable[[], list[str]]:
    """Record the current state; returns a function that restores it and returns the names of the changed items."""
    before = [(item, value) for item in _current_items() for value in _read(item)]

    def restore() -> list[str]:
        return [item.name for item, value in before if _restore(item, value)]

    return restore


def _read(item: _StateItem) -> Iterator[Any]:
    # Skip items that cannot be read (a deleted working directory, two torch settings that differ).
    with contextlib.suppress(Exception):
        yield item.read()


def _restore(item: _StateItem, value: Any) -> bool:
    with contextlib.suppress(Exception):
        if item.read() != value:
            item.write(value)
            return True
    return False


def _current_items() -> Iterator[_StateItem]:
    yield from _ITEMS
    if threading.current_thread() is threading.main_thread():
        yield _SIGNALS
    if not _modes():  # a mode would intercept the generator's state tensor
        yield _SEED


def _function_modes() -> tuple[Any, ...]:
    """The default device, and the modes around the call; a default device that is set within one replaces it."""
    count, at = torch._C._len_torch_function_stack(), torch._C._get_function_stack_at  # noqa: SLF001
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # noqa: SLF001 - the public one counts blocks
    return (context, _device.CURRENT_DEVICE, *map(at, range(count)))


def _set_function_modes(values: tuple[Any, ...]) -> None:
    # Not by set_default_device: it would bring back a block's mode, after the block's end.
    for _ in range(torch._C._len_torch_function_stack()):  # noqa: SLF001
        torch.overrides._pop_mode()  # type: ignore[no-untyped-call]  # noqa: SLF001
    context, _device.CURRENT_DEVICE, *modes = values
    for mode in modes:
        torch.overrides._push_mode(mode)  # type: ignore[no-untyped-call]  # noqa: SLF001
    torch._GLOBAL_DEVICE_CONTEXT.device_context = context  # noqa: SLF001


def _deterministic() -> tuple[bool, bool, bool, bool]:
    own = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    return (*own, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)


def _set_deterministic(values: tuple[bool, bool, bool, bool]) -> None:
    torch.use_deterministic_algorithms(values[0], warn_only=values[1])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = values[2:]


def _warnings() -> tuple[Any, ...]:
    shown = warnings.showwarning, getattr(warnings, "_showwarnmsg_impl", None)
    return (warnings.filters, list(warnings.filters), *shown)


def _set_warnings(values: tuple[Any, ...]) -> None:
    filters, content, show, implementation = values
    warnings.filters = filters
    warnings.simplefilter("default")  # invalidates Python's cache of filters
    warnings.filters[:] = content  # type: ignore[index]
    warnings.showwarning = show
    if implementation is not None:
        warnings._showwarnmsg_impl = implementation  # type: ignore[attr-defined]  # noqa: SLF001 - as catch_warnings


def _signals() -> list[tuple[int, Any]]:
    # Handlers that Python did not install are None and cannot be restored.
    found = ((number, _handler(number)) for number in range(1, signal.NSIG))
    return [(number, handler) for number, handler in found if handler is not None]


def _set_signals(values: list[tuple[int, Any]]) -> None:
    for number, handler in values:
        if _handler(number) != handler:
            signal.signal(number, handler)


def _seed() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    numpy_state = () if numpy is None else (numpy.random.get_state(legacy=False),)
    return (torch.default_generator.get_state().numpy().tobytes(), random.getstate(), *map(_NumpyState, numpy_state))


class _NumpyState:
    """The state of numpy's generator, compared by value: it contains an array."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self._key = (state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NumpyState) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _set_seed(values: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(torch.frombuffer(bytearray(values[0]), dtype=torch.uint8))
    random.setstate(values[1])
    for numpy_state in values[2:]:
        sys.modules["numpy"].random.set_state(numpy_state.state)


def _streams() -> tuple[Any, ...]:
    return (sys.stdin, sys.stdout, sys.stderr, sys.excepthook, threading.excepthook)


def _set_streams(values: tuple[Any, ...]) -> None:
    sys.stdin, sys.stdout, sys.stderr, sys.excepthook, threading.excepthook = values


SEED = "random numbers"
"""The name of the item that changes with every random number."""

_SEED = _StateItem(SEED, _seed, _set_seed)
_SIGNALS = _StateItem("signal handlers", _signals, _set_signals)
_ITEMS = (
    _StateItem("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _StateItem("default device", _function_modes, _set_function_modes),
    _StateItem("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _StateItem("deterministic algorithms", _deterministic, _set_deterministic),
    _StateItem("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _StateItem("number of threads", torch.get_num_threads, torch.set_num_threads),
    _StateItem("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _StateItem("warning filters", _warnings, _set_warnings),
    _StateItem("working directory", os.getcwd, os.chdir),
    _StateItem("streams and hooks of sys", _streams, _set_streams),
    _StateItem("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    _StateItem("garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    _StateItem("locale", lambda: locale.setlocale(locale.LC_ALL), lambda text: locale.setlocale(locale.LC_ALL, text)),
)
