"""Times of the steps of a whole model on a Vulkan device, by the device's own timestamps.

    python benchmarks/vulkan_steps.py [--shape 1.1b] [--schemes w4a16-g128,w8a8] [--only prefill] [--sequence]

The model is that of `whole_models.py`: random weights, a step of decode with a static cache of ``--places``, and one
call for a prompt of ``--prompt`` tokens. Prints Markdown. *Wall*: up to the next token on the host, the median of
plain runs; *submitted*: of that the time inside the program, from its copies in to its copies out; *steps*: the sum of
its steps' times, in a program that writes a timestamp after each, which keeps them from overlapping. Steps of one
shader and one number of workgroups are one row. ``--sequence`` adds the steps of one layer from the middle of the
program in order: ``|`` waits for the steps before it, ``+`` runs beside them.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import whole_models
from _table import header, markdown

import qcore
from qcore_vulkan import builder
from qcore_vulkan.builder import Program

_SHOWN = 34
"""Steps of ``--sequence``: about those of a layer."""


@dataclass
class Calls:
    """What programs did since `begin`: seconds inside them, and each of them."""

    seconds: float = 0.0
    programs: list[Program] = field(default_factory=list)

    def begin(self) -> None:
        self.seconds, self.programs = 0.0, []

    def watch(self) -> None:
        """Note every run of a program from now on."""
        plain = builder.Program.run

        def run(program: Program, *args: Any) -> float | None:
            start = time.perf_counter()
            try:
                return plain(program, *args)
            finally:
                self.seconds += time.perf_counter() - start
                self.programs.append(program)

        builder.Program.run = run  # type: ignore[method-assign]


@dataclass(frozen=True)
class Measured:
    """Medians of seconds, and the programs of the last call."""

    wall: float
    submitted: float
    programs: list[Program]


def main() -> None:
    """Measure every scheme, print a table of each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(whole_models.SHAPES), default="1.1b")
    parser.add_argument("--layers", type=int, help="blocks, if not all of the shape's")
    parser.add_argument("--schemes", default="w4a16-g128,w8a8")
    parser.add_argument("--table", default="w8a16", help="scheme of the embedding and the head; 'dense': as they are")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--places", type=int, default=640, help="of the static cache")
    parser.add_argument("--only", choices=["decode", "prefill"])
    parser.add_argument("--rows", type=int, default=13, help="of a table")
    parser.add_argument("--sequence", action="store_true")
    args = parser.parse_args()
    args.device = "cpu"
    print(header("Vulkan: steps of whole models"))
    calls = Calls()
    calls.watch()
    for scheme in args.schemes.split(","):
        with qcore.using("vulkan,torch"):
            _scheme(scheme, calls, args)


def _scheme(scheme: str, calls: Calls, args: argparse.Namespace) -> None:
    model = whole_models._made(scheme, args)  # noqa: SLF001 - benchmarks share what they measure
    parts = {"decode": _decode, "prefill": _prefill}
    plain: dict[str, Measured] = {}
    for timed in (False, True):  # a program that is timed step by step is another program
        os.environ["QCORE_VULKAN_STEP_TIMES"] = str(int(timed))
        torch._dynamo.reset()  # noqa: SLF001
        gc.collect()
        compiled = torch.compile(model, backend="qcore_vulkan")
        for name, measure in parts.items():
            if args.only in (None, name):
                found = measure(compiled, model, calls, args)
                if timed:
                    print(_table(f"{scheme} {name}", plain[name], found.programs, args), flush=True)
                plain.setdefault(name, found)


def _decode(call: Callable[..., Any], model: Any, calls: Calls, args: argparse.Namespace) -> Measured:
    cache = whole_models._cache(model, args)  # noqa: SLF001
    ids, place = torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    def step() -> None:
        nonlocal ids, place
        ids = whole_models._step(call, ids, place, cache)  # noqa: SLF001
        place = place + 1
        int(ids)  # waits for the device

    return _measured(step, calls, runs=20, left_out=4)


def _prefill(call: Callable[..., Any], model: Any, calls: Calls, args: argparse.Namespace) -> Measured:
    cache = whole_models._cache(model, args)  # noqa: SLF001
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, model.config.vocab_size, (1, args.prompt), generator=generator)
    place = torch.arange(args.prompt)

    def step() -> None:
        for layer in cache.layers:
            layer.cumulative_length.zero_()  # not `reset`, which writes whole caches as well
        int(whole_models._step(call, ids, place, cache))  # noqa: SLF001

    return _measured(step, calls, runs=7, left_out=2)


def _measured(step: Callable[[], None], calls: Calls, runs: int, left_out: int) -> Measured:
    times, inside = [], []
    for _ in range(runs):
        calls.begin()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
        inside.append(calls.seconds)
    return Measured(statistics.median(times[left_out:]), statistics.median(inside[left_out:]), calls.programs)


def _table(what: str, plain: Measured, programs: list[Program], args: argparse.Namespace) -> str:
    steps = [step for program in programs for step in program.steps]
    times = [us for program in programs for us in program.times()]
    barriers = sum(step.barrier for step in steps) - len(programs)
    by_shape: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    for step, us in zip(steps, times, strict=True):
        by_shape[step.name, step.groups].append(us)
    by_time = sorted(by_shape.items(), key=lambda item: -sum(item[1]))
    rows = [
        [
            name,
            "x".join(map(str, groups)),
            str(len(us)),
            f"{sum(us):.0f}",
            f"{statistics.mean(us):.2f}",
            f"{min(us):.2f}",
        ]
        for (name, groups), us in by_time[: args.rows]
    ]
    totals: dict[str, float] = defaultdict(float)
    for (name, _), us in by_time:
        totals[name] += sum(us) / 1e3
    listed = ", ".join(f"{name} {ms:.2f}" for name, ms in sorted(totals.items(), key=lambda item: -item[1]))
    lines = [
        f"\n## {what}\n",
        f"- Wall {1e3 * plain.wall:.2f} ms, submitted {1e3 * plain.submitted:.2f}, steps {sum(times) / 1e3:.2f}",
        f"- {len(programs)} programs, {len(steps)} steps, {barriers} barriers",
        f"- Milliseconds by shader: {listed}\n",
        markdown(("shader", "workgroups", "steps", "us", "mean", "least"), rows),
    ]
    if args.sequence:
        middle = len(steps) // 2
        part = list(zip(steps, times, strict=True))[middle : middle + _SHOWN]
        lines.append("\n" + " ".join(f"{'|' if step.barrier else '+'}{step.name}:{us:.1f}" for step, us in part))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
