"""Time every kernel that supports a layer on this machine and store the times, so that the fastest is selected.

The times are stored in the cache directory by plugin version, device and driver, and take precedence over ranks.
Exits with 1 if they cannot be stored.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import arguments
from .output import FAILED, OK, CommandResult, Table
from .progress import Progress

NAME = "tune"
HELP = "time the kernels, so that the fastest is selected"
EXAMPLES = (
    "qcore tune --scheme w4a16-g128 --n 1024 --k 1024",
    "qcore tune --model small.safetensors --rows 1,64 --json",
)


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``qcore tune``."""
    arguments.add_measured(parser)
    arguments.add_sizes(parser)
    arguments.add_device_and_dtype(parser)
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="a checkpoint, whose schemes and sizes replace --n and --k"
    )


def run(args: argparse.Namespace) -> CommandResult:
    """Measure, and compare the decisions before and after."""
    from ..resolving import resolver
    from .measuring import cases, left_out_notes

    measured = _model_cases(args) if args.model else cases(args.scheme, [(args.n, args.k)], args.device, args.dtype)
    before = [_kernel(case) for case in measured]
    timings = []
    with Progress("measuring", unit="weights").shown() as progress:
        for done, case in enumerate(measured):
            progress(done, len(measured), f"{case.scheme} N={case.request.n} K={case.request.k}")
            timings.append(_measure(case, args))
    resolver.forget()
    rows = [_row(case, found, old) for case, found, old in zip(measured, timings, before, strict=True)]
    stored = all(m.stored for found in timings for m in found)
    return _result(rows, args.rows, stored, left_out_notes(measured))


def _model_cases(args: argparse.Namespace) -> list[Any]:
    from .measuring import cases
    from .model_sizes import model_sizes

    found = []
    for scheme, sizes in model_sizes(args.model).items():
        if not args.scheme or scheme in args.scheme:
            found += cases([scheme], sizes, args.device, args.dtype)
    return found


def _kernel(case: Any) -> str:
    from dataclasses import replace

    from ..resolving.resolver import decide
    from ..runtime.settings import current

    decision = decide(case.request, replace(current(), strict=False))
    return decision.kernel.name if decision.kernel else ""


def _measure(case: Any, args: argparse.Namespace) -> Any:
    from ..resolving import tuning

    return tuning.measure(case.request, case.kernels, args.rows, args.seconds)


def _row(case: Any, found: Any, old: str) -> dict[str, Any]:
    new = _kernel(case)
    times = [{"plugin": m.plugin, "kernel": m.kernel, "milliseconds": m.milliseconds} for m in found]
    sizes = {"n": case.request.n, "k": case.request.k}
    return {"scheme": case.scheme, **sizes, "before": old, "after": new, "changed": old != new, "measured": times}


def _result(rows: list[dict[str, Any]], counts: tuple[int, ...], stored: bool, notes: list[str]) -> CommandResult:
    from ..runtime import disk_cache

    header = ("scheme", "N", "K", "kernel", *(f"M={m} ms" for m in counts))
    lines = [line for row in rows for line in _lines(row, counts)]
    changed = sum(row["changed"] for row in rows)
    storage = (
        f"stored in {disk_cache.cache_dir()}" if stored else f"NOT stored: {disk_cache.cache_dir()} is not writable"
    )
    summary = f"{len(rows)} weights measured, {changed} decisions changed; times {storage}"
    data = {"weights": rows, "changed": changed, "stored": stored, "cache": str(disk_cache.cache_dir())}
    table = Table(header, lines, right=frozenset({1, 2, *range(4, 4 + len(counts))}))
    return CommandResult(data, [table, *map(_change, rows), *notes, summary], OK if stored else FAILED)


def _lines(row: dict[str, Any], counts: tuple[int, ...]) -> list[tuple[str, ...]]:
    sizes = (row["scheme"], str(row["n"]), str(row["k"]))
    return [(*sizes, m["kernel"], *(f"{m['milliseconds'][c]:.3f}" for c in counts)) for m in row["measured"]]


def _change(row: dict[str, Any]) -> str:
    weight = f"{row['scheme']} N={row['n']} K={row['k']}"
    return f"{weight}: {row['before']} -> {row['after']}" if row["changed"] else f"{weight}: {row['after']}, unchanged"
