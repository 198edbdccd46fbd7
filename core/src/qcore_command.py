"""The ``qcore`` command's way in: help and version without torch, whose import takes a second or more.

It stands outside the package ``qcore``, whose import brings torch. (So does ``python -m qcore``.)
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading

_TEXTS = {"-h", "--help", "--version"}
"""Arguments after which argparse prints something and ends: no command runs, so nothing of torch is needed."""


def main() -> int:
    """Run the command and return its exit code."""
    if _TEXTS.intersection(sys.argv[1:]) and "--" not in sys.argv:
        _leave_package_unexecuted()
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # neither ignored nor the caller's own
    stoppable = is_default and threading.current_thread() is threading.main_thread()
    if stoppable:
        signal.signal(signal.SIGINT, _stop)
    from qcore.cli import main as run

    if stoppable:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _stop(_number: int, _frame: object) -> None:
    """End the process: numpy and torch survive a KeyboardInterrupt in their import, and fail later."""
    if sys.stderr is not None:  # a process without a console has none
        sys.stderr.write("stopped\n")
        sys.stderr.flush()
    os._exit(130)


def _leave_package_unexecuted() -> None:
    """Let the modules below ``qcore`` be imported without running ``qcore/__init__``; the process ends soon."""
    spec = importlib.util.find_spec("qcore")
    assert spec is not None
    sys.modules["qcore"] = importlib.util.module_from_spec(spec)
