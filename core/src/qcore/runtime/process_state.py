"""The state of the process that a plugin must leave as it was: torch's defaults, warnings, signals, seeds.

A plugin's code runs in the user's process. What it changes there while qcore waits for it is put back.
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

# The public function makes an enum of each number and answer, at fifty times the price.
_handler: Callable[[int], Any] = importlib.import_module("_signal").getsignal
# Dispatch is asked for its state, for which torch has no public way.
_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001


@dataclass(frozen=True)
class _Part:
    """One part of the state: ``read`` gives it as a value that can be compared, ``write`` puts such a value back."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


def snapshot() -> Callable[[], list[str]]:
    """What holds now; the answer, when called, puts it back and returns the names of what had changed."""
    before = [(part, value) for part in _parts() for value in _read(part)]

    def restore() -> list[str]:
        return [part.name for part, value in before if _put_back(part, value)]

    return restore


def _read(part: _Part) -> Iterator[Any]:
    # One that cannot be read here (no working directory any more, two settings of torch that differ) is left alone.
    with contextlib.suppress(Exception):
        yield part.read()


def _put_back(part: _Part, value: Any) -> bool:
    with contextlib.suppress(Exception):
        if part.read() != value:
            part.write(value)
            return True
    return False


def _parts() -> Iterator[_Part]:
    yield from _ALWAYS
    if threading.current_thread() is threading.main_thread():
        yield _SIGNALS
    if not _modes():  # a mode would see the generator's state as one more tensor of the user's
        yield _SEED


def _default_device() -> Any:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # noqa: SLF001 - the public one counts blocks
    return None if context is None else context.device


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
    warnings.simplefilter("default")  # so that Python notices that there are others
    warnings.filters[:] = content  # type: ignore[index]
    warnings.showwarning = show
    if implementation is not None:
        warnings._showwarnmsg_impl = implementation  # type: ignore[attr-defined]  # noqa: SLF001 - as catch_warnings


def _signals() -> list[tuple[int, Any]]:
    # Handlers that Python did not install are None, and cannot be put back.
    found = ((number, _handler(number)) for number in range(1, signal.NSIG))
    return [(number, handler) for number, handler in found if handler is not None]


def _set_signals(values: list[tuple[int, Any]]) -> None:
    for number, handler in values:
        if _handler(number) != handler:
            signal.signal(number, handler)


def _seed() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    drawn = () if numpy is None else (numpy.random.get_state(legacy=False),)
    return (torch.default_generator.get_state().numpy().tobytes(), random.getstate(), *map(_Drawn, drawn))


class _Drawn:
    """The state of numpy's generator, which holds an array."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self._key = (state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Drawn) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _set_seed(values: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(torch.frombuffer(bytearray(values[0]), dtype=torch.uint8))
    random.setstate(values[1])
    for drawn in values[2:]:
        sys.modules["numpy"].random.set_state(drawn.state)


def _streams() -> tuple[Any, ...]:
    return (sys.stdin, sys.stdout, sys.stderr, sys.excepthook, threading.excepthook)


def _set_streams(values: tuple[Any, ...]) -> None:
    sys.stdin, sys.stdout, sys.stderr, sys.excepthook, threading.excepthook = values


SEED = "random numbers"
"""The name of the part that whoever draws a random number changes."""

_SEED = _Part(SEED, _seed, _set_seed)
_SIGNALS = _Part("signal handlers", _signals, _set_signals)
_ALWAYS = (
    _Part("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Part("default device", _default_device, torch.set_default_device),
    _Part("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Part("deterministic algorithms", _deterministic, _set_deterministic),
    _Part("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _Part("number of threads", torch.get_num_threads, torch.set_num_threads),
    _Part("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _Part("warning filters", _warnings, _set_warnings),
    _Part("working directory", os.getcwd, os.chdir),
    _Part("streams and hooks of sys", _streams, _set_streams),
    _Part("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    _Part("garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    _Part("locale", lambda: locale.setlocale(locale.LC_ALL), lambda text: locale.setlocale(locale.LC_ALL, text)),
)
