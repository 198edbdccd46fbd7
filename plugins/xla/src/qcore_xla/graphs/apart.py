"""Tracing without the caller's stack, which JAX would keep.

JAX notes with each operation that it traces where it was called, and keeps that as long as the trace: those of its own
functions, such as `jnp.where`, for good. The stack of a compiled model has code that Dynamo has made for it, and Dynamo
frees a model's graphs, with their programs, once that code is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def without_callers(run: Callable[[], T]) -> T:
    """What ``run`` returns or raises, called in a thread of its own; it may use JAX only.

    If the user has other settings of JAX in this thread than in others (``with jax.default_matmul_precision(...)``), it
    is called here.
    """
    settings = _settings()
    found: Future[tuple[bool, Any]] = Future()

    def work() -> None:
        try:
            with jax.default_device(settings["jax_default_device"]):
                same = _settings() == settings
                found.set_result((same, run() if same else None))
        except BaseException as error:  # noqa: BLE001 - the caller's, whatever it is
            found.set_exception(error)

    thread = threading.Thread(target=work, name="qcore_xla traces a program")
    thread.start()
    is_done, result = found.result()
    thread.join()
    return result if is_done else run()


def _settings() -> dict[str, Any]:
    return {name: getattr(jax.config, name, None) for name in jax.config.values}
