"""Run the kit for one plugin."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..discovery.registry import registry
from .certificate import Certificate
from .kit import Kit, fresh_seed
from .processes import Progress, Supervisor
from .target import check_installed


def run(
    backend: str,
    *,
    device: str | None = None,
    seed: int | None = None,
    schemes: Iterable[str] | None = None,
    contracts: Iterable[str] | None = None,
    select: str | Iterable[str] | None = None,
    gaps: str | Path | None = None,
    jobs: int = 0,
    seconds: float | None = None,
    step_seconds: float | None = None,
    progress: Progress | None = None,
) -> Certificate:
    """Run the conformance kit for one installed plugin.

    **Arguments:**

    - ``backend``: the plugin's name.
    - ``device``: the torch device to test on; default: the device in the plugin's probe (``Available(details={"device":
      "cuda:0"})``), else the torch device of the plugin's name, else the CPU.
    - ``seed``: of the random inputs; default a fresh one, which is recorded in the certificate.
    - ``schemes``, ``contracts``: only these; default all.
    - ``select``: only cases and laws whose id matches one of these globs, or contains one of these words.
    - ``gaps``: the file of known gaps; default ``qcore_gaps.toml`` in the directory of the plugin's module.
    - ``jobs``: number of processes that share the cases and laws; 0: this process. A step that ends its process fails,
      and the others are run in a new one. A plugin that was registered as an object is run in this process.
    - ``seconds``: begin no step after so many; the certificate then holds what was found, and is not ok.
    - ``step_seconds``: in processes, a step that lasts longer fails, and its process is ended.
    - ``progress``: called with (steps done, total steps, id of the next step).

    Raises `ConformanceError` for an unknown plugin or contract, or an unreadable list of gaps. For a plugin that is
    broken or not available here, the certificate says so.
    """
    limits = {"schemes": schemes, "contracts": contracts, "select": select}
    chosen = {name: value if isinstance(value, str) else value and tuple(value) for name, value in limits.items()}
    seed = fresh_seed() if seed is None else seed
    arguments: dict[str, Any] = {"device": device, "seed": seed, "gaps": gaps, **chosen}
    tell = progress or (lambda _done, _total, _name: None)
    check_installed(backend)
    if jobs > 0 and not registry.is_object(backend):
        return Supervisor({"backend": backend, **arguments}, jobs, seconds, step_seconds, tell).run()
    kit = Kit(backend, **arguments)
    deadline = time.time() + (math.inf if seconds is None else seconds)
    steps = kit.steps()
    for done, (name, step) in enumerate(steps.items()):
        if time.time() > deadline:
            break
        tell(done, len(steps), name)
        step()
    return kit.finish("" if seconds is None else f"not run within the limit of {seconds:g} seconds")
