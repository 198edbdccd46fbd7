"""Probes plugins, each in its own process, several in parallel."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..discovery.registry import PluginStatus, State, crash_marks
from ..runtime import disk_cache

_STARTUP = 60.0
"""Seconds to import torch, in addition to the plugin's own limit."""
_POLL = 0.02
_CHILD = "import sys, json; sys.path[:] = json.loads(sys.argv.pop(1)); from qcore.cli.probe import main; main()"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


def probe_all(plugins: Iterable[PluginStatus], seconds: float, at_once: int) -> dict[str, PluginStatus]:
    """The status of each plugin by name; no plugin is imported in this process."""
    waiting, done = deque(plugins), {}
    with TemporaryDirectory(prefix="qcore-doctor-") as folder, contextlib.ExitStack() as stack:
        running: list[_Child] = []
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_Child(waiting.popleft(), seconds, Path(folder) / str(len(waiting))))
                stack.callback(running[-1].kill)
            time.sleep(_POLL)
            for child in [c for c in running if c.ended()]:
                running.remove(child)
                done[child.plugin.name] = child.status()
    return done


class _Child:
    """One process that probes one plugin."""

    def __init__(self, plugin: PluginStatus, seconds: float, folder: Path) -> None:
        self.plugin, self.seconds = plugin, seconds
        self._result, self._trace, self._output = (folder / end for end in ("result", "trace", "output"))
        folder.mkdir()
        # The same sys.path as here, so that it imports the plugin that this process discovered.
        arguments = [json.dumps(sys.path), plugin.name, str(seconds), str(self._result), str(self._trace)]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, arguments of our own making
                [sys.executable, "-c", _CHILD, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that processes started by the probe can be killed with it
            )
        self._started = time.monotonic()

    def ended(self) -> bool:
        timed_out = time.monotonic() - self._started > self.seconds + _STARTUP
        if timed_out:
            self.kill()
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process and its children."""
        was_running = self._process.poll() is None
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            elif self._process.poll() is None:
                self._process.kill()
        self._process.wait()
        if was_running:
            self._clear_marks()

    def _clear_marks(self) -> None:
        """Remove the crash marks of a process that was killed here, for a timeout or Ctrl-C: it did not crash."""
        for mark in self._marks():
            disk_cache.remove("running", mark)

    def _marks(self) -> tuple[str, ...]:
        return crash_marks(self.plugin.name, self.plugin.dist, self.plugin.version)

    def status(self) -> PluginStatus:
        """The reported status, or one derived from how the process ended."""
        try:
            found = json.loads(self._result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return self._crash_status()
        return PluginStatus(**{**found, "state": State(found["state"])})

    def _crash_status(self) -> PluginStatus:
        trace = _text(self._trace)
        if "Timeout (" in trace or self._process.returncode == -int(getattr(signal, "SIGKILL", 9)):
            return self._timeout_status(trace)
        state, doing = State.IMPORT_FAILED, "importing"
        if disk_cache.crashed(self._marks()[1]):
            state, doing = State.PROBE_FAILED, "probing"
        how = _how_it_ended(self._process.returncode)
        last = "" if trace else _last_line(_text(self._output))
        return self._failed(state, f"the process {how} while {doing} the plugin{_where(trace)}{last}")

    def _timeout_status(self, trace: str) -> PluginStatus:
        self._clear_marks()
        probing = "qcore_probe" in trace
        state = State.PROBE_FAILED if probing else State.IMPORT_FAILED
        doing = "its probe" if probing else "its import"
        return self._failed(
            state, f"{doing} did not finish within {self.seconds:g} seconds{_where(trace)}", self.seconds
        )

    def _failed(self, state: State, reason: str, seconds: float = 0.0) -> PluginStatus:
        p = self.plugin
        return PluginStatus(p.name, p.dist, p.version, state, reason, seconds=seconds, broken=True)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _where(trace: str) -> str:
    """The innermost frame of the plugin itself in a stack trace, e.g. `` (in qcore_probe, /x/plugin.py:12)``."""
    pluggy = Path(sys.modules["pluggy"].__file__ or "").parent
    skipped = tuple(f"{house}{os.sep}" for house in (Path(__file__).parents[1], pluggy))
    library = sysconfig.get_path("stdlib")
    for frame in _FRAME.finditer(trace):
        file = frame["file"]
        inner = file.startswith(library) and "site-packages" not in file
        if not (inner or file.startswith((*skipped, "<frozen"))):
            return f" (in {frame['function']}, {file}:{frame['line']})"
    return ""


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f": {lines[-1]}" if lines else ""


def as_json(status: PluginStatus) -> dict[str, Any]:
    """A status as plain values for JSON."""
    return {**vars(status), "state": str(status.state), "seconds": round(status.seconds, 4)}
