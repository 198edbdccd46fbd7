"""The ``qcore`` command's way in: help and version without torch, whose import takes a second or more.

It stands outside the package ``qcore``, whose import brings torch. (So does ``python -m qcore``.)
"""

from __future__ import annotations

import importlib.util
import sys

_TEXTS = {"-h", "--help", "--version"}
"""Arguments after which argparse prints something and ends: no command runs, so nothing of torch is needed."""


def main() -> int:
    """Run the command and return its exit code."""
    if _TEXTS.intersection(sys.argv[1:]) and "--" not in sys.argv:
        _leave_package_unexecuted()
    from qcore.cli import main as run

    return run()


def _leave_package_unexecuted() -> None:
    """Let the modules below ``qcore`` be imported without running ``qcore/__init__``; the process ends soon."""
    spec = importlib.util.find_spec("qcore")
    assert spec is not None
    sys.modules["qcore"] = importlib.util.module_from_spec(spec)
