"""Functions in clean processes: tests may run Triton's interpreter in theirs, and LLVM ends the one it fails in."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parent))  # this folder's files import each other, whoever starts them


def find(name: str) -> Any:
    """The object that ``module:name`` or ``file.py:name`` names."""
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), attribute)
    stem = Path(place).stem
    if stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(stem, place)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[stem])
    return getattr(sys.modules[stem], attribute)


def in_processes(function: str, payloads: Iterable[Any], workers: int = 2) -> list[Any]:
    """``function(payload)`` for each, ``workers`` at a time, answers in order.

    Payloads and answers are plain values. Where one raises, or ends its process, the answer is ``{"error": why}``.
    """
    payloads = list(payloads)
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(payloads)):
        waiting.put(index)
    found: dict[int, Any] = {}
    arguments = (function, payloads, waiting, found)
    threads = [threading.Thread(target=_work, args=arguments) for _ in range(min(workers, len(payloads)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(payloads))]


def _work(function: str, payloads: list[Any], waiting: queue.SimpleQueue[int], found: dict[int, Any]) -> None:
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        server: subprocess.Popen[str] | None = None
        while not waiting.empty():
            with contextlib.suppress(queue.Empty):
                index = waiting.get_nowait()
                if server is None or server.poll() is not None:
                    server = _start(function, log)
                found[index] = _ask(server, payloads[index], log)
        if server is not None:
            server.communicate()


def _start(function: str, log: IO[str]) -> subprocess.Popen[str]:
    unwanted = ("TRITON_INTERPRET", "COVERAGE", "QCORE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    command = [sys.executable, __file__, function]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=clean)


def _ask(server: subprocess.Popen[str], payload: Any, log: IO[str]) -> Any:
    assert server.stdin is not None
    assert server.stdout is not None
    log.truncate(0)
    server.stdin.write(json.dumps(payload) + "\n")
    server.stdin.flush()
    line = server.stdout.readline()
    answer = json.loads(line) if line else {"error": f"the process ended with {server.wait()}"}
    if isinstance(answer, dict) and answer.get("error"):
        answer["error"] += _complaints(log)
    return answer


def _complaints(log: IO[str]) -> str:
    """The errors among all that LLVM prints."""
    log.seek(0)
    lines = [line.strip("\0\n ")[:300] for line in log if re.search(r"\berror\b", line, re.IGNORECASE)]
    return "".join(f"\n{line}" for line in lines[:3])


def _serve(function: str) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a compiler prints is no answer
    call = find(function)
    for line in sys.stdin:
        answers.write(json.dumps(_attempt(call, json.loads(line))) + "\n")
        answers.flush()


def _attempt(call: Any, payload: Any) -> Any:
    try:
        return call(payload)
    except Exception as error:  # noqa: BLE001  whoever asked decides
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


if __name__ == "__main__":
    _serve(sys.argv[1])
