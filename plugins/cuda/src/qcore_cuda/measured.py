"""Measurements: those of ``qcore tune`` on this machine, and those shipped for an architecture.

A record names a kernel and holds the fields of its configuration; tables have one flat record a line, so that they diff
well. Measurements of this machine are valid for the versions of the plugin and of Triton that made them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from qcore_triton.weights import INTEGER

from .costs import Cost, forms
from .problem import GemmProblem
from .runtime.device import Device

_HERE = Path(__file__).parent
FURTHER = 8
"""Estimates for up to so many times as many rows are considered."""


class Record(NamedTuple):
    """**Fields:** ``kernel``: the name of a product; ``config``: the fields of its configuration."""

    kernel: str
    config: dict[str, Any]


class Estimate(NamedTuple):
    """**Fields:** ``record``: a kernel and its configuration; ``cost``: of a problem's work with so many ``rows``."""

    record: Record
    cost: Cost
    rows: int


@lru_cache(maxsize=8)
def _table(arch: int, activations: str) -> dict[str, dict[int, list[Estimate]]]:
    """Form -> rows -> estimates."""
    path = _HERE / "tables" / f"sm_{arch}.json"
    if not path.exists():
        return {}
    found: dict[str, dict[int, list[Estimate]]] = {}
    for line in json.loads(path.read_text("utf-8")).get(activations, []):
        cost = Cost(line["occupancy"], tuple(line["us"]))
        estimate = Estimate(Record(line["kernel"], line["config"]), cost, line["rows"])
        found.setdefault(line["form"], {}).setdefault(line["rows"], []).append(estimate)
    return found


def shipped(device: Device, problem: GemmProblem) -> Iterator[list[Estimate]]:
    """What the architecture's table holds for a problem's form and number of rows, then for the nearest forms.

    A number of rows that was not measured uses the next larger one that was. What was measured with up to `FURTHER`
    times as many comes along: fewer rows take a kernel no longer, and what is the fastest for many may be for fewer,
    too. (Kernels for up to eight rows have code of their own for one.)
    """
    table = _table(device.arch, problem.activations) if device.arch else {}
    for form in dict.fromkeys(forms(problem)):
        by_rows = table.get(form, {})
        rows = sorted(m for m in by_rows if m >= (problem.split_rows or problem.rows))
        if rows:
            most = rows[0] if problem.split_rows or problem.rows <= 8 else rows[0] * FURTHER
            yield [estimate for m in rows if m <= most for estimate in by_rows[m]]


@lru_cache(maxsize=1)
def version() -> str:
    """A hash of the kernels' and the plugin's source and of Triton's version: measurements of another do not count."""
    import triton

    import qcore_triton

    digest = hashlib.sha256(triton.__version__.encode())
    for folder in (_HERE, Path(qcore_triton.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _key(device: Device, problem: GemmProblem) -> str:
    """The properties that the time of a product depends on most; problems of one key share a measurement."""
    p, sizes = problem, (problem.bits, problem.n, problem.k, problem.rows)
    form: tuple[Any, ...] = (
        (p.grouped, p.step, p.x_zero, p.units)
        if p.codes
        else (p.split_rows, p.block, p.narrow, p.exact, p.whole, p.half)
    )
    if p.element != INTEGER:
        form = (*form, p.element, str(p.scale))
    return f"{version()}|{tuple(device)}|{sizes}|{p.group}|{p.zero}|{form}"


def tuned(device: Device, problem: GemmProblem) -> Record | None:
    """The measurement of this machine for a problem, or None."""
    from qcore.plugin_api import read_record

    record = read_record(f"cuda-{problem.activations}", _key(device, problem)) or {}
    kernel, config = record.get("kernel"), record.get("config")
    return Record(kernel, config) if isinstance(kernel, str) and isinstance(config, dict) else None


def keep(device: Device, problem: GemmProblem, record: Record) -> bool:
    """Store a measured choice on disk (atomically), for processes that start later; returns whether that worked."""
    from qcore.plugin_api import write_record

    return write_record(f"cuda-{problem.activations}", _key(device, problem), **record._asdict())
