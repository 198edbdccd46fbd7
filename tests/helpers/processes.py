"""Python in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from importlib.metadata import entry_points


def unmeasured() -> dict[str, str]:
    """The environment without coverage: it doubles the time of processes that run for long and covers no more."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}


@cache
def installed_plugins() -> str:
    """The installed plugins but the built-in one, for QCORE_DISABLE: each probe costs a process seconds."""
    names = {entry.name for entry in entry_points(group="qcore.plugins.v1")}
    return ",".join(sorted(names - {"torch"}))


def printed(*command: object, timeout: float = 300, env: dict[str, str] | None = None) -> str:
    """What ``python *command`` prints; fails with all its output unless it exits with 0.

    Warnings of the child do not matter, unless the command says ``-W error``.
    """
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout, env=env)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout
