"""Measure every configuration of qcore-cuda on this GPU and write the table that is shipped for its architecture.

    python benchmarks/cuda_tables.py [--output FILE] [--budget SECONDS] [--shapes KxN,...] [--only TEXT]

Kernels are compiled first, in as many processes as there are cores; a configuration that a process could not compile or
run is left out. What is measured replaces its place in ``plugins/cuda/src/qcore_cuda/tables/sm_NN.json``, which keeps
the rest; ``--only`` takes parts such as ``float w8 M=1`` (commas between several).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

START = time.monotonic()
SHAPES = "4096x4096,4096x14336,14336x4096,8192x8192,8192x28672"
FLOAT_ROWS = {4: (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048), 8: (1, 8, 16, 64, 256, 1024, 2048)}
INT8_ROWS = {4: (1, 16, 64, 256, 2048), 8: (1, 16, 64, 256, 2048)}
TABLES = Path(__file__).parent.parent / "plugins" / "cuda" / "src" / "qcore_cuda" / "tables"
GROUP = 128


def main() -> None:
    """Compile, measure, write."""
    args = _arguments()
    shapes = [tuple(int(side) for side in text.split("x")) for text in args.shapes.split(",")]
    order = [(kind, bits, m) for kind, bits, m in _order() if _wanted(args.only, kind, bits, m)]
    broken = _compile_all(order, args.workers, args.budget / 2)
    import torch

    records = _read(args.output)
    for kind, bits, m in order:
        for k, n in shapes:
            if time.monotonic() - START > args.budget:
                print(f"left out: {kind} w{bits} M={m} {k}x{n}", flush=True)
                continue
            best = _measure(kind, bits, m, k, n, broken)
            if best:
                records[kind][bits, m, n, k] = _record(bits, m, k, n, best[0])
                shown = " | ".join(f"{us:.2f} {_short(config)}" for us, config in best[:3])
                print(f"{kind} w{bits} M={m} {k}x{n}: {shown}", flush=True)
        _write(args.output, records, torch.cuda.get_device_name())


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=TABLES / "sm_90.json")
    parser.add_argument("--budget", type=float, default=200.0)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 4)
    return parser.parse_args()


def _order() -> list[tuple[str, int, int]]:
    """(kind, bits, rows); few rows first: they are the cheapest and matter most."""
    tables = (("float", FLOAT_ROWS), ("int8", INT8_ROWS))
    return sorted(
        ((kind, bits, m) for kind, table in tables for bits in (4, 8) for m in table[bits]), key=lambda o: o[2]
    )


def _wanted(only: str, kind: str, bits: int, m: int) -> bool:
    return not only or any(f"{kind} w{bits} M={m} ".startswith(part.strip() + " ") for part in only.split(","))


def _read(path: Path) -> dict[str, dict[Any, dict[str, Any]]]:
    """The records of a table by kind and (bits, rows, n, k); none where there is no table yet."""
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    kinds = ("float", "int8")
    return {kind: {(r["bits"], r["rows"], r["n"], r["k"]): r for r in known.get(kind, [])} for kind in kinds}


def _write(path: Path, records: dict[str, dict[Any, dict[str, Any]]], machine: str) -> None:
    lines = {kind: ",\n  ".join(json.dumps(rows[key]) for key in sorted(rows)) for kind, rows in records.items()}
    body = ",\n".join(f' "{kind}": [\n  {text}\n ]' for kind, text in lines.items())
    path.write_text(f'{{\n "machine": {json.dumps(machine)},\n{body}\n}}\n', encoding="utf-8")


def _record(bits: int, rows: int, k: int, n: int, best: tuple[float, Any]) -> dict[str, Any]:
    return {"bits": bits, "rows": rows, "n": n, "k": k, "us": round(best[0], 2), **_short(best[1])}


def _short(choice: Any) -> dict[str, Any]:
    """The kernel's name, and the fields of its configuration that are not its defaults."""
    defaults, unset = choice.config._field_defaults, object()
    fields = choice.config._asdict().items()
    return {
        "kernel": choice.product.name,
        "config": {name: value for name, value in fields if value != defaults.get(name, unset)},
    }


def _weight(bits: int, n: int, k: int) -> Any:
    import torch

    from qcore_triton.weights import Weight

    if bits == 8:
        data = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
        return Weight(data, torch.rand(1, n, device="cuda").to(torch.bfloat16) * 1e-3, None, n, k, 8, k)
    data = torch.randint(0, 256, (n // 16, k // GROUP, 16, GROUP // 2), dtype=torch.uint8, device="cuda")
    scale = torch.rand(k // GROUP, n, device="cuda").to(torch.bfloat16) * 1e-2
    return Weight(data, scale, None, n, k, 4, GROUP)


def _call(kind: str, x: Any, weight: Any, choice: Any) -> Any:
    """A product by a given choice, planned as the plugin plans it."""
    from qcore_cuda import int8, weight_only
    from qcore_cuda.products.base import Operands
    from qcore_triton.codes import mode_of

    if kind == "float":
        plan = weight_only.plan(x, weight, x.dtype)
        return partial(choice.product.launch, x, weight, None, plan.device, plan.problem, choice.config)
    device, problem, *_ = int8.plan_of(x, weight, x.dtype, False, None)
    operands = Operands(weight, None, None, None)
    return partial(int8.run, x, mode_of(x, True, None), operands, int8.planned(device, problem, choice))


def _candidates(kind: str, bits: int, m: int, n: int, k: int) -> list[Any]:
    import torch

    from qcore_cuda import int8, selection, weight_only

    x, weight = torch.empty(m, k, device="cuda", dtype=torch.bfloat16), _weight(bits, n, k)
    if kind == "float":
        device, problem, *_ = weight_only.plan(x, weight, x.dtype)
    else:
        device, problem, *_ = int8.plan_of(x, weight, x.dtype, False, None)
    return selection.candidates(device, problem)


def _measure(kind: str, bits: int, m: int, k: int, n: int, broken: set[Any]) -> list[tuple[float, Any]]:
    import torch

    from qcore_cuda.tuning import copies, ranked

    many = copies(_weight(bits, n, k))
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)

    def calls(choice: Any) -> list[Any]:
        return [_call(kind, x, weight, choice) for weight in many]

    candidates = _candidates(kind, bits, m, n, k)
    found = ranked([c for c in candidates if (kind, bits, _class(m), _form(c)) not in broken], calls)
    torch.cuda.empty_cache()
    return found


def _form(choice: Any) -> tuple[str, Any]:
    """A choice, as another process can be told."""
    return choice.product.name, choice.config


def _class(m: int) -> int:
    """Row counts of one class share compiled kernels."""
    return 1 if m <= 8 else 16 if m <= 16 else 64


def _compile_all(order: list[tuple[str, int, int]], workers: int, budget: float) -> set[Any]:
    """Run every configuration once on a small weight, in processes, so that the disk cache holds it afterwards."""
    jobs: dict[Any, int] = {}
    for kind, bits, m in order:
        for choice in _candidates(kind, bits, m, 4096, 4096):
            jobs.setdefault((kind, bits, _class(m), _form(choice)), m)
    broken = set()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = {pool.submit(_try, *job, m): job for job, m in jobs.items()}
        for future in as_completed(waiting):
            if error := future.result():
                broken.add(waiting[future])
                print(f"left out {waiting[future]}: {error}", flush=True)
            if time.monotonic() - START > budget:
                for other in waiting:
                    other.cancel()
                break
    print(f"# {len(jobs)} configurations compiled in {time.monotonic() - START:.0f} s", flush=True)
    return broken


def _try(kind: str, bits: int, _class: int, form: tuple[str, Any], m: int) -> str:
    import torch

    from qcore_cuda.products.base import Choice
    from qcore_cuda.products.catalog import FLOAT_PRODUCTS, INT8_PRODUCTS

    try:
        name, config = form
        products = FLOAT_PRODUCTS if kind == "float" else INT8_PRODUCTS
        choice = Choice(next(product for product in products if product.name == name), config)
        x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16)
        _call(kind, x, _weight(bits, 512, 1024), choice)()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - whatever it is, the configuration is not for this GPU
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    return ""


if __name__ == "__main__":
    main()
