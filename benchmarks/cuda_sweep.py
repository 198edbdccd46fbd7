"""Schemes of qcore-cuda at sizes of real models, beside torch's bfloat16 product: where is a cell slower?

    python benchmarks/cuda_sweep.py [--shapes KxN,...] [--rows M,...] [--schemes S;...] [--budget S] [--output FILE]

Times are those of CUDA graphs, over copies of the weight that together take twice the second-level cache, bfloat16 ones
and quantized ones each, all in turn.
Prints the ratio to bfloat16 for each cell, then how many cells are slower by more than 5 % and by more than 2
microseconds, and the worst; FILE is complete for the sizes so far after each of them. Kernels are compiled in processes
first.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import _cuda_forms
import torch
from _cuda_timing import Replay, in_turns
from torch.nn import functional as F

import qcore
from qcore.nn import QuantizedLinear
from qcore_cuda.problem import bucket
from qcore_cuda.selection import choose

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
    _compile(schemes, shapes, rows, args.budget / 3)
    _heat()
    result = Result(rows)
    for k, n in shapes:
        if time.monotonic() - START > args.budget:
            result.left_out.append(f"{k}x{n}")
            continue
        _measure(result, k, n, schemes, rows, args.budget)
        if args.output:  # what there is, in case that the rest is cut off
            args.output.write_text(result.text(), encoding="utf-8")
        print(f"# {k}x{n}: {time.monotonic() - START:.0f} s", flush=True)
        torch.cuda.empty_cache()
    print(result.summary())


@dataclass
class Result:
    """The cells that were measured. **Fields:** ``times``: by (K x N, scheme, M): ours, bfloat16, in microseconds."""

    rows: list[int]
    times: dict[tuple[str, str, int], tuple[float, float]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def line(self, size: str, scheme: str) -> str:
        """A line of the table; cells that were not reached are empty."""
        found = [self.times.get((size, scheme, m)) for m in self.rows]
        return (
            f"| {size} {scheme} | {' | '.join('' if pair is None else f'{pair[1] / pair[0]:.2f}' for pair in found)} |"
        )

    def slower(self) -> list[tuple[float, str]]:
        """The cells that are slower than bfloat16 by more than 5 % and 2 us: ratio and description, the worst first."""
        found = [
            (base / ours, f"{size} {scheme} M={m}: {ours:.1f} us, bfloat16 {base:.1f} us")
            for (size, scheme, m), (ours, base) in self.times.items()
            if ours > max(1.05 * base, base + 2)
        ]
        return sorted(found)

    def summary(self) -> str:
        """How many cells are slower, of which schemes, and which are the worst."""
        slow = self.slower()
        schemes = Counter(text.split()[1] for _, text in slow)
        lines = [f"{len(slow)} of {len(self.times)} cells are slower by more than 5 % and 2 us."]
        lines += (
            [f"By scheme: {', '.join(f'{scheme} {count}' for scheme, count in schemes.most_common())}."] if slow else []
        )
        lines += [f"Worst: {ratio:.2f} {text}" for ratio, text in slow[:10]]
        lines += [f"Not measured: {', '.join(self.left_out)}"] if self.left_out else []
        return "\n".join(lines)

    def text(self) -> str:
        """The table, the summary, and all slower cells."""
        head = [
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ratio to bfloat16 by rows",
            "",
            f"| K x N, scheme | {' | '.join(f'M={m}' for m in self.rows)} |",
            "|---|" + "---|" * len(self.rows),
        ]
        lines = [self.line(*key) for key in dict.fromkeys((size, scheme) for size, scheme, _ in self.times)]
        return "\n".join([*head, *lines, "", self.summary(), "", *(text for _, text in self.slower()), ""])


def _measure(result: Result, k: int, n: int, schemes: list[str], rows: list[int], budget: float) -> None:
    """All cells of a size. Graphs of all schemes take turns with one of bfloat16."""
    weights, size = _cuda_forms.rotating_floats(n, k), f"{k}x{n}"
    layers = {scheme: _quantized(weights[0], scheme) for scheme in schemes}
    for m in rows:
        if time.monotonic() - START > budget:
            result.left_out.append(f"{size} from M={m} on")
            break
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        graphs = [Replay([partial(F.linear, x, weight) for weight in weights])]
        graphs += [Replay([partial(layer, x) for layer in layers[scheme]]) for scheme in schemes]
        base, *ours = in_turns(graphs, 5)
        for scheme, us in zip(schemes, ours, strict=True):
            result.times[size, scheme, m] = us, base
        del graphs
    for scheme in schemes:
        print(result.line(size, scheme), flush=True)


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--schemes", default="", help="separated by semicolons")
    parser.add_argument("--budget", type=float, default=270.0, help="seconds after which no further cell is begun")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def _compile(schemes: list[str], shapes: list[Any], rows: list[int], limit: float) -> None:
    """Compile the kernels that will be chosen, each once; after ``limit`` seconds first calls compile the rest."""
    jobs = {}
    device = _cuda_forms.device()
    for scheme, (k, n), m in itertools.product(schemes, shapes, rows):
        form = FORMS[scheme]
        choice = choose(device, _cuda_forms.problem_of(form, bucket(m), n, k))
        key = (form, _cuda_forms.compiled_as(choice, m))
        jobs.setdefault(key, (form, choice.product.name, choice.config._asdict(), m, n, k))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(_cuda_forms.works, *job): job for job in jobs.values()}
        try:
            for future in as_completed(waiting, timeout=limit):
                if error := future.result():
                    print(f"{waiting[future]}: {error}", flush=True)
        except TimeoutError:
            pool.shutdown(wait=False, cancel_futures=True)
            print("# not all kernels were compiled in time", flush=True)
    print(f"# {len(jobs)} kernels compiled in {time.monotonic() - START:.0f} s", flush=True)


def _heat(seconds: float = 2.0) -> None:
    """Bring clocks to where a busy GPU has them."""
    a, until = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def _quantized(weight: torch.Tensor, scheme: str) -> list[QuantizedLinear]:
    """Copies of a layer. Quantizers take no search: they change no time of a product."""
    n, k = weight.shape
    layer = torch.nn.Linear(k, n, bias=False, device="meta", dtype=weight.dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    made = QuantizedLinear.from_float(layer, scheme + ("@minmax" if "asym" in scheme else "@absmax"))
    assert made.decision.plugin == "cuda", str(made.decision)
    count = _cuda_forms.rotations(n * k * FORMS[scheme].bits // 8)
    return [made, *(copy.deepcopy(made) for _ in range(count - 1))]


if __name__ == "__main__":
    assert qcore.__version__
    main()
