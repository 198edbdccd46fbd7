"""Measure every configuration of qcore-cuda on this GPU, and fit the table that is shipped for its architecture.

    python benchmarks/cuda_tables.py [--output FILE] [--raw FILE] [--budget SECONDS] [--shapes KxN,...] [--rows M,...]
                                     [--only FORM,...] [--known KERNEL,...] [--alone]
    python benchmarks/cuda_tables.py --fit RAW [RAW ...] [--output FILE]

Configurations are compiled first, in as many processes as there are cores, and checked on a small problem; those that
fail are left out. ``--known``: of all kernels but these only the configurations of the shipped table are measured, for
these, half and twice as many rows, which takes a fifth of the time. ``--alone``: only the kernels of ``--known`` are
measured, and the table's lines of other kernels stay. A choice holds for all numbers of rows up to the next smaller one
of the table: int8 kernels, some of which are slower with three quarters of the rows, are timed with both. ``--raw``
gets a line per form, size and number of rows, with the time of each configuration; later files of ``--fit``, which
needs no GPU, replace what earlier ones say of a configuration. The fit
prints by how much the choice for a size exceeds the best time if that size is left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import _cuda_fit
import _cuda_forms
import torch
from _cuda_forms import FORMS, Form

from qcore.errors import first_line
from qcore_cuda import selection
from qcore_cuda.runtime.device import Device
from qcore_cuda.tuning import copies, microseconds

START = time.monotonic()
SHAPES = (
    "4096x1024,2048x4096,4096x4096,4096x6144,2560x9728,14336x4096,4096x14336,5120x13824,8192x8192,3584x18944,"
    "5120x1024,11008x2048,16384x3072"
)
ROWS = "1,8,16,32,64,128,256,512,1024,2048"
TABLES = Path(__file__).parent.parent / "plugins" / "cuda" / "src" / "qcore_cuda" / "tables"
HOPPER = Device(90, False, 132)
BETWEEN = 256
"""Kernels of codes are timed with three quarters of the rows, too, up to so many rows."""


def main() -> None:
    """Measure and fit, or fit."""
    args = _arguments()
    raw = [json.loads(line) for path in args.fit for line in path.read_text("utf-8").splitlines()]
    if not args.fit:
        raw = _measured(args)
    _write(args.output, raw, HOPPER if args.fit else _cuda_forms.device())


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=TABLES / "sm_90.json")
    parser.add_argument("--raw", type=Path, default=Path("cuda_tables.jsonl"))
    parser.add_argument("--fit", type=Path, nargs="+", default=[])
    parser.add_argument("--budget", type=float, default=500.0)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--only", default="")
    parser.add_argument("--known", default="")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 4)
    return parser.parse_args()


def _measured(args: Any) -> list[Any]:
    shapes = [tuple(int(side) for side in text.split("x")) for text in args.shapes.split(",")]
    rows = [int(m) for m in args.rows.split(",")]
    forms = [f for f in FORMS if not args.only or f"{f.activations}:{f.name}" in args.only.split(",")]
    device = _cuda_forms.device()
    new = args.known.split(",") if args.known else []
    cells = {
        (f, m, k, n): _candidates(device, f, m, n, k, new, args.alone) for m in rows for f in forms for k, n in shapes
    }
    broken = _compile(cells, args.workers, args.budget / 2)
    found = []
    with args.raw.open("w", encoding="utf-8") as file:
        for (form, m, k, n), choices in cells.items():
            if time.monotonic() - START > args.budget:
                print(f"left out: {form.activations} {form.name} M={m} {k}x{n}", flush=True)
                continue
            usable = [c for c in choices if (form, _cuda_forms.compiled_as(c, m)) not in broken]
            found.append([form.activations, form.name, m, k, n, *_times(form, m, k, n, usable)])
            file.write(json.dumps(found[-1]) + "\n")
            file.flush()
    return found


def _candidates(device: Device, form: Form, m: int, n: int, k: int, new: list[str], alone: bool) -> list[Any]:
    """All of them, or those of the shipped table, for nearby rows as well, unless ``alone``, and of kernels ``new``."""
    problem = _cuda_forms.problem_of(form, m, n, k)
    found = selection.candidates(device, problem)
    if not new:
        return found
    if alone:
        return [choice for choice in found if choice.product.name in new]
    nearby = [problem, *(_cuda_forms.problem_of(form, rows, n, k) for rows in (m // 2, 2 * m) if 16 < rows <= 2048)]
    known = [choice for other in nearby for _, choice in selection.estimated(device, other)]
    usable = [choice for choice in known if choice.product.serves(device, problem)]
    return list(dict.fromkeys([*usable, *(choice for choice in found if choice.product.name in new)]))


def _compile(cells: dict[Any, list[Any]], workers: int, budget: float) -> set[Any]:
    """Compile and check every configuration, in processes; returns those that failed or were not reached."""
    jobs = {}
    for (form, m, *_), choices in cells.items():
        for choice in choices:
            jobs.setdefault(
                (form, _cuda_forms.compiled_as(choice, m)), (choice.product.name, choice.config._asdict(), m)
            )
    broken = set(jobs)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(_cuda_forms.works, job[0], *made): job for job, made in jobs.items()}
        for future in as_completed(waiting):
            if error := future.result():
                print(f"left out {waiting[future]}: {error}", flush=True)
            else:
                broken.discard(waiting[future])
            if time.monotonic() - START > budget:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    print(f"# {len(jobs)} configurations compiled in {time.monotonic() - START:.0f} s", flush=True)
    return broken


def _times(form: Form, m: int, k: int, n: int, choices: list[Any]) -> tuple[float, list[Any]]:
    """Microseconds of torch's bfloat16 product, and of each choice."""
    many = _cuda_forms.rotating_floats(n, k)
    made, found = _cuda_forms.instance(form, m, n, k), []
    dense = microseconds([partial(torch.nn.functional.linear, made.x, w) for w in many])
    weights = copies(made.weight)
    several = [made, made._replace(x=made.x[: 3 * m // 4])] if form.codes and 16 < m <= BETWEEN else [made]
    for choice in choices:
        us = _time([[_cuda_forms.call(one._replace(weight=w), choice) for w in weights] for one in several])
        if isinstance(us, float):
            found.append([choice.product.name, choice.config._asdict(), round(us, 2)])
        else:
            print(f"left out {form.name} M={m} {k}x{n} {choice}: {us}", flush=True)
    torch.cuda.empty_cache()
    return round(dense, 2), found


def _time(calls: list[list[Any]]) -> float | str:
    """The longest time, or what went wrong: other configurations are wanted all the same."""
    try:
        return max(microseconds(each) for each in calls)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return first_line(error)


def _write(path: Path, raw: list[Any], device: Device) -> None:
    """Fit, and write one line per kept configuration; forms and numbers of rows that were not measured stay."""
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    forms = {(form.activations, form.name): form for form in FORMS}
    tables: dict[str, dict[Any, list[Any]]] = {"float": {}, "int8": {}}
    for part, table in tables.items():
        for line in known.get(part, []):
            table.setdefault((line["form"], line["rows"]), []).append(line)
    for (part, name, m), times in _cuda_fit.grouped(raw).items():
        problem = _cuda_forms.problem_of(forms[part, name], m, 4096, 4096)
        kept = _cuda_fit.kept(device, problem, times)
        measured = {kernel for kernel, _ in times}
        tables[part][name, m] = [line for line in tables[part].get((name, m), []) if line["kernel"] not in measured]
        tables[part][name, m] += [_line(name, m, config, fitted, forms[part, name]) for config, fitted in kept.items()]
        regrets = _cuda_fit.regrets(device, problem, times)
        print(
            f"{part} {name} M={m}: {len(kept)} of {len(times)} configurations; sizes left out cost "
            f"{statistics.mean(regrets) - 1:.1%} more, at most {max(regrets) - 1:.0%}",
            flush=True,
        )
    body = ",\n".join(
        f' "{part}": [\n  '
        + ",\n  ".join(json.dumps(line) for key in sorted(table) for line in sorted(table[key], key=json.dumps))
        + "\n ]"
        for part, table in tables.items()
    )
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else known.get("machine", "")
    path.write_text(f'{{\n "machine": {json.dumps(machine)},\n{body}\n}}\n', encoding="utf-8")


def _line(form: str, rows: int, config: Any, fitted: Any, kind: Form) -> dict[str, Any]:
    kernel, fields = config
    defaults, unset = _cuda_forms.choice_of(kind, kernel, dict(fields)).config._field_defaults, object()
    return {
        "form": form, "rows": rows, "kernel": kernel,
        "config": {name: value for name, value in fields if value != defaults.get(name, unset)},
        "occupancy": fitted.cost.occupancy, "us": list(fitted.cost.coefficients),
    }  # fmt: skip


if __name__ == "__main__":
    main()
