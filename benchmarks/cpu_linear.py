"""Quantized linears on the CPU against bfloat16 ``F.linear``, every cell measured in turns with it in one run.

Prints Markdown tables of ratios (above 1 is faster than bfloat16 ``F.linear`` at the same row count), with the floor of
each cell: bytes of the weight over the measured read bandwidth, or operations over the processor's rate, whichever is
longer. Weights rotate through copies that together exceed the last-level cache, as the layers of a model do. Rounds
in which ``F.linear`` ran more than a fifth above its fastest are left out: another process had a core then. Peers that
are not installed are named in a line. ``--output FILE`` also writes the result.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from _peers import missing, peers
from _table import header, markdown
from torch import Tensor
from torch.nn import functional as F

import qcore
from qcore.nn import QuantizedLinear
from qcore.resolving.tuning import interleaved_medians

SCHEMES = (
    "w4a16-g128", "w4a16-g128-asym", "w4a16-g32", "w8a16", "w8a16-asym", "w8a16-g128", "w8a8", "w8a8-asym", "w8a8-g128",
    "w4a8-g128", "w4a8-g32",
)  # fmt: skip
ROWS = (1, 8, 32, 128, 512)
SPREAD = 96 * 2**20
"""Bytes that the copies of one weight take together: several times a last-level cache."""
ROUNDS = 9
"""Quiet rounds wanted per table."""
PATIENCE = 4
"""How many times longer than asked for to wait for them."""
RATES = {"int8": 2.1e12, "bfloat16": 0.96e12, "float32": 0.53e12}
"""Operations per second of two AVX-512 cores with VNNI and bf16, as measured for the project's notes."""
SLOW = {
    ("torch.plain.linear", "float32"): "no int4 kernel for float32 x: dequantized in the cache, float32 product",
    ("torch.cpu.w8a16", "float32"): "exact in four int8 digits per x; float32 F.linear itself is at 0.2 to 0.4",
    ("torch.cpu.w8a16", "bfloat16"): (
        "exact in three int8 digits per x, and one oneDNN call per group: 32 calls for groups of 128"
    ),
    ("torch.plain.linear", "bfloat16"): "no ATen kernel for this scheme: dequantized in the cache",
    ("torch.cpu.w4a8", "bfloat16"): "one oneDNN call per group, 20 us or more each: 128 calls for groups of 32",
    ("torch.cpu.w4a8", "float32"): "one oneDNN call per group, 20 us or more each: 128 calls for groups of 32",
}


Call = Callable[[Tensor], object]


def rotating(copies: list[Call]) -> Call:
    """A call that uses the next of several copies each time."""
    turn = cycle(copies)
    return lambda x: next(turn)(x)  # noqa: PLW0108  another copy each time


def copies_of(nbytes: int) -> int:
    """How many copies of a weight exceed the cache."""
    return max(2, math.ceil(SPREAD / nbytes))


def dense(n: int, k: int, dtype: torch.dtype) -> Call:
    """``F.linear`` in ``dtype``."""
    weights = [torch.randn(n, k).to(dtype) for _ in range(copies_of(n * k * dtype.itemsize))]
    return rotating([lambda x, w=w: F.linear(x.to(dtype), w) for w in weights])


def quantized(scheme: str, n: int, k: int, dtype: torch.dtype) -> tuple[str, Call]:
    """The kernel that serves ``scheme``, by name, and a call of it."""
    parsed = qcore.Scheme.parse(scheme)
    weight = qcore.quantize(torch.randn(n, k), parsed.weight, "minmax" if "asym" in scheme else "absmax")
    kernel = QuantizedLinear.from_qtensor(weight, scheme=scheme, dtype=dtype).decision.kernel
    first = kernel.pack(weight)
    packs = [first, *({name: t.clone() for name, t in first.items()} for _ in range(copies_of(weight.nbytes) - 1))]
    return kernel.name, rotating([lambda x, p=p: kernel(x, p, None) for p in packs])


def _round(calls: list[Callable[[], object]], shuffle: Callable[[list[int]], None]) -> list[float]:
    """Milliseconds of each call, in the order of ``calls``, and of the first one once more at the end."""
    order = list(range(1, len(calls)))
    shuffle(order)
    found = {i: _milliseconds(calls[i]) for i in (0, *order)}
    return [*(found[i] for i in range(len(calls))), _milliseconds(calls[0])]


def quiet_medians(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """Median milliseconds of each call, taking turns; the first is the base, which also closes each round.

    Between the two, the order changes from round to round: what follows the base finds its weight in the caches.
    """
    rounds: list[list[float]] = []
    shuffle = random.Random(0).shuffle  # noqa: S311 - nothing secret
    for call in calls:
        call()
    deadline = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < deadline or len(_quiet(rounds)) < ROUNDS:
        rounds.append(_round(calls, shuffle))
        if time.perf_counter() > deadline + PATIENCE * seconds * len(calls):
            break
    kept = _quiet(rounds) if len(_quiet(rounds)) >= 3 else rounds
    if len(kept) < ROUNDS:
        print(f"(only {len(kept)} of {len(rounds)} rounds were quiet)", file=sys.stderr)
    return [statistics.median(column) for column in zip(*kept, strict=True)][:-1]


def _quiet(rounds: list[list[float]]) -> list[list[float]]:
    fastest = min((min(r[0], r[-1]) for r in rounds), default=0.0)
    return [r for r in rounds if max(r[0], r[-1]) < 1.2 * fastest]


def _milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def bandwidth() -> float:
    """Bytes per second that reading a large tensor reaches."""
    big = torch.zeros(2**28, dtype=torch.uint8).view(torch.int64)
    (ms,) = interleaved_medians([big.sum], torch.device("cpu"), 1.0)
    return big.nbytes / ms * 1e3


def floor_ms(scheme: str, rows: int, n: int, k: int, dtype: torch.dtype, speed: float) -> float:
    bits = 4 if scheme.startswith("w4") else 8
    unit = "int8" if "a8" in scheme else str(dtype).removeprefix("torch.")
    return max(n * k * bits / 8 / speed, 2 * rows * n * k / RATES[unit]) * 1e3


@dataclass
class Contest:
    """Everything that is measured for one activation dtype, built once and called with every row count."""

    n: int
    k: int
    dtype: torch.dtype
    kernels: dict[str, str]
    calls: dict[str, Call]

    @classmethod
    def build(cls, n: int, k: int, dtype: torch.dtype) -> Contest:
        calls = {"bfloat16 F.linear": dense(n, k, torch.bfloat16), f"{_name(dtype)} F.linear": dense(n, k, dtype)}
        made = {scheme: quantized(scheme, n, k, dtype) for scheme in SCHEMES}
        calls |= {scheme: call for scheme, (_, call) in made.items()}
        for peer, (make, nbytes) in peers(n, k, dtype).items():
            calls[peer] = rotating([make() for _ in range(copies_of(nbytes))])
        return cls(n, k, dtype, {scheme: name for scheme, (name, _) in made.items()}, calls)

    def table(self, rows: int, speed: float, seconds: float) -> Iterator[tuple[str, ...]]:
        """The lines of one table."""
        x = torch.randn(rows, self.k).to(self.dtype)
        base_x = x.bfloat16()
        calls = [partial(call, base_x if label.startswith("bf") else x) for label, call in self.calls.items()]
        base, *times = quiet_medians(calls, seconds)
        yield ("bfloat16 F.linear", "-", f"{base:.3f}", "1.00", "-", "")
        for label, ms in zip(list(self.calls)[1:], times, strict=True):
            yield self._line(label, ms, base, floor_ms(label, rows, self.n, self.k, self.dtype, speed))

    def _line(self, label: str, ms: float, base: float, floor: float) -> tuple[str, ...]:
        kernel, ratio = self.kernels.get(label, "-"), base / ms
        reached = f"{floor / ms:.0%}" if label in self.kernels else "-"
        why = SLOW.get((kernel, _name(self.dtype)), "") if ratio < 0.4 else ""
        return (label, kernel, f"{ms:.3f}", f"{ratio:.2f}", reached, why)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="4096x4096", help="NxK")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="per cell")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # A process that has freed a large tensor keeps its heap, as one that has loaded a model does; before that, glibc
    # gives the memory of every result back, and page faults take longer than the products.
    large = torch.zeros(31 << 20, dtype=torch.uint8)
    del large
    n, k = map(int, options.shape.split("x"))
    speed = bandwidth()
    parts = [header(f"Quantized linears on the CPU, N x K = {n} x {k}")]
    parts.append(f"- Read bandwidth measured in this run: {speed / 1e9:.0f} GB/s")
    if missing():
        parts.append(f"- Peers not installed: {', '.join(missing())}")
    print("\n".join(parts))
    columns = ("scheme or peer", "kernel", "ms", "ratio to bfloat16", "of the floor", "why below 0.4")
    with torch.no_grad():
        for dtype in options.dtypes.split(","):
            contest = Contest.build(n, k, getattr(torch, dtype))
            for rows in map(int, options.rows.split(",")):
                lines = contest.table(rows, speed, options.seconds)
                part = f"\n## x {dtype}, M = {rows}\n\n{markdown(columns, lines)}"
                print(part, flush=True)
                parts.append(part)
    if options.output:
        options.output.write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
