"""Plugins that end the process or hang at one stage, each in a forked child; run as a script, it prints JSON.

``python broken_children.py FOLDER MODE:STAGE ...`` forks for each pair a process that meets the plugin, and another one
after it. A process that hangs is interrupted, as by Ctrl-C, once it has said what is the matter. One interpreter that
has imported torch serves them all: a start costs seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from broken_plugins import GoodKernel, Kind
from broken_plugins import _Entry as Entry

import qcore
from qcore.discovery.registry import BUILTIN, registry
from qcore.resolving import offers, resolver, verification
from qcore.resolving.explaining import plain_request
from qcore.runtime import guard

LIMIT = 0.3
_DEADLINE = 30.0
_WARNED = "\x1ewarned: "


def _hang(_right: Any) -> None:
    while True:
        time.sleep(0.01)


MODES = {
    "exit": lambda _: os._exit(7),
    "abort": lambda _: os.abort(),
    "segfault": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "hang": _hang,
    "terminated": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "hung up": lambda _: os.kill(os.getpid(), signal.SIGHUP),
    "interrupted": lambda _: os.kill(os.getpid(), signal.SIGINT),
}
BLAMED = ("exit", "abort", "segfault", "kill", "hang")
"""What is the plugin's fault. A signal that anybody may send at any moment is not."""


def _install(mode: str, stage: str) -> None:
    healthy: Any = type(sys)("healthy")
    healthy.qcore_linear = qcore.hookimpl(lambda request: qcore.Offer(GoodKernel("healthy.kernel", request), 2999))
    entries = [Kind(stage, mode, MODES[mode]).entry("1.0"), Entry("healthy", "qcore-healthy", "1.0", lambda: healthy)]
    registry._entries = {**{e.name: e for e in entries}, BUILTIN: registry.entries()[BUILTIN]}
    registry.generation += 1


def _live(mode: str, stage: str) -> dict[str, Any]:
    _install(mode, stage)
    # What verification would find first is not what is tried here.
    qcore.configure(verify="off" if stage in ("pack", "call") else "once")
    weight = qcore.quantize(torch.linspace(-1, 1, 40 * 72).reshape(40, 72), "int8")
    x = torch.linspace(-1, 1, 2 * 72).reshape(2, 72)
    layer = qcore.nn.QuantizedLinear.from_qtensor(weight)
    right = torch.allclose(layer(x), x @ weight.dequantize().t(), atol=1e-4)
    layer.state_dict()
    explained = str(qcore.resolve(plain_request("w8a16", n=40, k=72, dtype=torch.float32)))
    return {"right": right, "plugin": layer.decision.plugin, "explained": explained}


def _as_new() -> None:
    """Forget what the first process, which all others are forked from, found out."""
    guard._passed.clear()
    verification.forget()
    resolver.forget()
    offers._warned.clear()


def _child(mode: str, stage: str, result: Path, errors: Path) -> None:
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has it ignored
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_, **__: os.write(2, f"{_WARNED}{message}\n".encode())
    try:
        result.write_text(json.dumps(_live(mode, stage)))
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - told, by a process that has nobody to raise it to
        os.write(2, traceback.format_exc().encode())
        code = 1
    # As the interpreter would at its end; this one is the parent's.
    from qcore.runtime import disk_cache

    disk_cache.clear_own_marks()
    os._exit(code)


def _meet(mode: str, stage: str, folder: Path) -> dict[str, Any]:
    """One process with the plugin; how it ended and what it said."""
    result, errors = folder / "result", folder / "errors"
    result.unlink(missing_ok=True)
    errors.write_text("")
    start = time.monotonic()
    pid = os.fork()
    if not pid:
        _child(mode, stage, result, errors)
    interrupted, status = False, None
    while status is None and time.monotonic() - start < _DEADLINE:
        time.sleep(0.01)
        ended, found = os.waitpid(pid, os.WNOHANG)
        status = found if ended else None
        if status is None and not interrupted and "If you interrupt it" in errors.read_text():
            interrupted = True
            os.kill(pid, signal.SIGINT)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    found = json.loads(result.read_text()) if result.exists() and result.stat().st_size else {}
    code = None if status is None else os.waitstatus_to_exitcode(status)
    said = errors.read_text()
    told = [part for part in said.split(_WARNED) if "qcore-broken" in part]
    return {"code": code, "interrupted": interrupted, "said": said, "told": told, **found}


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    guard.SECONDS = guard.FIRST_CALL_SECONDS = LIMIT
    for module in ("qcore.resolving.resolver", "qcore.resolving.binding"):
        sys.modules[module].FIRST_CALL_SECONDS = LIMIT  # type: ignore[attr-defined]
    _live("exit", "nowhere")  # what is imported late is imported here
    done = {}
    for number, pair in enumerate(sys.argv[2:]):
        mode, _, stage = pair.partition(":")
        folder = root / str(number)
        (folder / "cache").mkdir(parents=True)
        os.environ["QCORE_CACHE_DIR"] = str(folder / "cache")
        _as_new()
        done[pair] = [_meet(mode, stage, folder), _meet(mode, stage, folder)]
    print(json.dumps(done))


if __name__ == "__main__":
    main()
