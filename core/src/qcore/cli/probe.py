"""Probes one plugin in this process; ``qcore doctor`` runs this module in a child process for each plugin.

The watchdog of `faulthandler` ends the process after a timeout, even if the probe hangs in native code that holds the
GIL, and writes the stack trace.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from ..discovery import registry as discovered
from ..discovery.registry import crash_marks, registry
from ..runtime import disk_cache


def probe(name: str) -> dict[str, Any]:
    """Import, register and probe one plugin, even if it crashed an earlier process."""
    entry = registry.entries()[name]
    for mark in crash_marks(name, entry.dist, entry.version):
        disk_cache.remove("running", mark)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the status contains the same information
        return dataclasses.asdict(registry.status(name))


def watched(name: str, seconds: float, trace: Path) -> dict[str, Any]:
    """`probe` with a time limit in seconds; a hang or crash leaves its Python stack in the file ``trace``."""
    # The registry's own limit must not fire before the watchdog.
    discovered.PROBE_SECONDS = 2 * seconds
    with trace.open("w", encoding="utf-8") as file:
        faulthandler.enable(file)
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)
        try:
            return probe(name)
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()


def main() -> None:
    """Run ``NAME SECONDS RESULT TRACE`` from the command line; writes the status to the file RESULT as JSON."""
    name, seconds, result, trace = sys.argv[1:]
    found = watched(name, float(seconds), Path(trace))
    Path(result).write_text(json.dumps(found, default=str), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # threads that the plugin left behind must not keep this process
