"""Schemes of qcore-cuda at sizes of real models, beside torch's bfloat16 product: where is a cell slower?

    python benchmarks/cuda_sweep.py [--shapes KxN,...] [--rows M,...] [--schemes S;...] [--budget S] [--output FILE]

Times are those of CUDA graphs, over copies of the weight that together exceed the second-level cache, both in turn.
Prints the ratio to bfloat16 for each cell, then the cells that are slower by more than 5 % and by more than 2
microseconds. Kernels are compiled in processes first.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import _cuda_forms
import torch
from torch.nn import functional as F

import qcore
from qcore.nn import QuantizedLinear
from qcore_cuda.problem import bucket
from qcore_cuda.selection import choose
from qcore_cuda.tuning import microseconds

START = time.monotonic()
SHAPES = (
    "4096x1024,8192x1024,7168x2048,18944x3584,14336x4096,4096x6144,2560x9728,4096x12288,3840x15360,7168x18432,"
    "3584x18944,4096x28672"
)
ROWS = "1,2,4,8,16,24,32,64,96,128,256,512,1024,2048"
FORMS = {
    "w4a16-g128": _cuda_forms.Form(False, 4, 128),
    "w4a16-g128-asym": _cuda_forms.Form(False, 4, 128, 1),
    "w4a16-g32": _cuda_forms.Form(False, 4, 32),
    "w4a16-g32-asym": _cuda_forms.Form(False, 4, 32, 1),
    "w8a16": _cuda_forms.Form(False, 8, 0),
    "w8a16-g128": _cuda_forms.Form(False, 8, 128),
    "w8a8": _cuda_forms.Form(True, 8, 0),
    "w8a8-static(0.03,0)": _cuda_forms.Form(True, 8, 0),
    "w4a8-g128": _cuda_forms.Form(True, 4, 128),
    "w4a8-g32": _cuda_forms.Form(True, 4, 32),
}


def main() -> None:
    """Compile, measure, print."""
    args = _arguments()
    torch.set_grad_enabled(False)
    shapes = [tuple(int(side) for side in text.split("x")) for text in args.shapes.split(",")]
    rows = [int(m) for m in args.rows.split(",")]
    schemes = [scheme for scheme in FORMS if not args.schemes or scheme in args.schemes.split(";")]
    _compile(schemes, shapes, rows)
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ratio to bfloat16 by rows",
        "",
        f"| K x N, scheme | {' | '.join(f'M={m}' for m in rows)} |",
        "|---|" + "---|" * len(rows),
    ]
    slower: list[str] = []
    cells = 0
    for k, n in shapes:
        weights = _cuda_forms.rotating_floats(n, k)
        inputs = {m: torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for m in rows}
        dense = {m: [partial(F.linear, x, w) for w in weights] for m, x in inputs.items()}
        for scheme in schemes:
            if time.monotonic() - START > args.budget:
                lines.append(f"| {k}x{n} {scheme} | left out |")
                continue
            layers = [_quantized(weight, scheme) for weight in weights]
            ratios = []
            for m, x in inputs.items():
                base, ours = _pair(dense[m], [partial(layer, x) for layer in layers])
                ratios.append(base / ours)
                cells += 1
                if ours > max(1.05 * base, base + 2):
                    slower.append(f"{k}x{n} {scheme} M={m}: {ours:.1f} us, bfloat16 {base:.1f}")
            lines.append(f"| {k}x{n} {scheme} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
            print(lines[-1], flush=True)
    lines += ["", f"{len(slower)} of {cells} cells are slower by more than 5 % and 2 us.", "", *slower]
    print("\n".join(lines[-len(slower) - 2 :]))
    if args.output:
        args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--schemes", default="", help="separated by semicolons")
    parser.add_argument("--budget", type=float, default=500.0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def _compile(schemes: list[str], shapes: list[Any], rows: list[int]) -> None:
    """Compile the kernels that will be chosen, each once."""
    jobs = {}
    device = _cuda_forms.device()
    for scheme, (k, n), m in itertools.product(schemes, shapes, rows):
        form = FORMS[scheme]
        choice = choose(device, _cuda_forms.problem_of(form, bucket(m), n, k))
        key = (form, _cuda_forms.compiled_as(choice, m))
        jobs.setdefault(key, (form, choice.product.name, choice.config._asdict(), m, n, k))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        for job, error in zip(
            jobs.values(), pool.map(_cuda_forms.works, *zip(*jobs.values(), strict=True)), strict=True
        ):
            if error:
                print(f"{job}: {error}", flush=True)
    print(f"# {len(jobs)} kernels compiled in {time.monotonic() - START:.0f} s", flush=True)


def _quantized(weight: torch.Tensor, scheme: str) -> QuantizedLinear:
    """Quantizers that take no search: they change no time of a product."""
    n, k = weight.shape
    layer = torch.nn.Linear(k, n, bias=False, device="meta", dtype=weight.dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    made = QuantizedLinear.from_float(layer, scheme + ("@minmax" if "asym" in scheme else "@absmax"))
    assert made.decision.plugin == "cuda", str(made.decision)
    return made


def _pair(dense: list[Any], ours: list[Any]) -> tuple[float, float]:
    """Both in turn, twice: the median of each."""
    turns = [(microseconds(dense, 3), microseconds(ours, 3)) for _ in range(2)]
    return statistics.median(a for a, _ in turns), statistics.median(b for _, b in turns)


if __name__ == "__main__":
    assert qcore.__version__
    main()
