"""Python in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def unmeasured() -> dict[str, str]:
    """The environment without coverage: it doubles the time of processes that run for long and covers no more."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}


def printed(*command: object, timeout: float = 300, env: dict[str, str] | None = None) -> str:
    """What ``python *command`` prints; fails with all its output unless it exits with 0.

    Warnings of the child do not matter, unless the command says ``-W error``.
    """
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout, env=env)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout
