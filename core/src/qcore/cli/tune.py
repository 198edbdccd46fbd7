"""Measure every kernel that can serve a layer here and keep the figures, so that the fastest serves from now on.

The figures are kept in the cache directory, by plugin version, device and driver, and decide between kernels whatever
their ranks. Exits with 1 if they cannot be stored.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import arguments
from .output import FAILED, OK, CommandResult, Table

NAME = "tune"
HELP = "measure the kernels, so that the fastest serves"
EXAMPLES = (
    "qcore tune --scheme w4a16-g128 --n 1024 --k 1024",
    "qcore tune --model small.safetensors --rows 1,64 --json",
)


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``qcore tune``."""
    arguments.add_measured(parser)
    arguments.add_sizes(parser)
    arguments.add_place(parser)
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="a checkpoint: its schemes and sizes, not --n and --k"
    )


def run(args: argparse.Namespace) -> CommandResult:
    """Measure, and compare the decisions before and after."""
    from ..resolving import resolver
    from .measuring import cases, left_out_notes

    measured = _model_cases(args) if args.model else cases(args.scheme, [(args.n, args.k)], args.device, args.dtype)
    before = [_kernel(case) for case in measured]
    figures = [_measure(case, args) for case in measured]
    resolver.forget()
    rows = [_row(case, found, old) for case, found, old in zip(measured, figures, before, strict=True)]
    stored = all(m.stored for found in figures for m in found)
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
    place = f"kept in {disk_cache.cache_dir()}" if stored else f"NOT kept: {disk_cache.cache_dir()} cannot be written"
    summary = f"{len(rows)} weights measured, {changed} decisions changed; figures {place}"
    data = {"weights": rows, "changed": changed, "stored": stored, "cache": str(disk_cache.cache_dir())}
    table = Table(header, lines, right=frozenset({1, 2, *range(4, 4 + len(counts))}))
    return CommandResult(data, [table, *map(_change, rows), *notes, summary], OK if stored else FAILED)


def _lines(row: dict[str, Any], counts: tuple[int, ...]) -> list[tuple[str, ...]]:
    sizes = (row["scheme"], str(row["n"]), str(row["k"]))
    return [(*sizes, m["kernel"], *(f"{m['milliseconds'][c]:.3f}" for c in counts)) for m in row["measured"]]


def _change(row: dict[str, Any]) -> str:
    what = f"{row['scheme']} N={row['n']} K={row['k']}"
    return f"{what}: {row['before']} -> {row['after']}" if row["changed"] else f"{what}: {row['after']}, as before"
