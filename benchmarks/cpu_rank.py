"""qcore-cpu beside the kernels that are built into qcore: where installing the plugin would make a layer slower.

Prints a Markdown table of ratios, built-in time over qcore-cpu's: above 1 the plugin is faster. Both run in turn in one
process and the least time of each counts. With ``--threads 1`` the clock is the process's CPU time, which other work on
the machine hardly touches (pin it: ``taskset -c 1``); with more threads it is the wall clock. ``--output FILE`` also
writes the table, and ``--table FILE`` adds the cells to a JSON file that the plugin reads its ranks from
(``plugins/cpu/src/qcore_cpu/tables``), in place of earlier ones with as many threads. For a lower instruction set than
the processor's best, restrict torch as well: ``QCORE_CPU_ISA=avx2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2``.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from _table import header, machine, markdown
from torch import nn

import qcore
from qcore.nn import QuantizedConv2d, QuantizedEmbedding, QuantizedLinear

LINEAR = (
    "w4a16-g128", "w4a16-g32", "w4a16-g32-asym", "w4a16-g64-fzp", "w4a16", "w8a16", "w8a16-g128", "wfp8a16", "mxfp4",
    "wnf4a16-g64", "w4a8-g32", "w4a8-g128", "w8a8", "w8a8-asym-aasym", "w8a8-static(0.02,0)",
)  # fmt: skip
CONV = ("w8a8", "w8a8-static(0.02,0)", "w8a16", "w4a16-g64")
ROWS = (1, 8, 32, 128, 512)
SHAPES = ((4096, 4096), (1536, 576), (576, 1536))
"""(N, K); the last two are those of SmolLM2-135M."""
IMAGES = ((64, 56, 64, 3), (256, 14, 256, 3), (512, 7, 512, 3), (256, 14, 1024, 1), (3, 64, 32, 3))
"""(in channels, side, out channels, kernel)."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
REPEATS = 1000
_cells: list[dict[str, Any]] = []
"""Every measured layer, as `qcore_cpu.ranking.Cell` describes it."""


def note(
    pair: tuple[nn.Module, nn.Module], x: str, scheme: str, size: tuple[int, int], ratios: dict[int, float]
) -> None:
    """Keep what was measured of a layer for ``--table``."""
    decision: Any = pair[1].decision
    about = {"contract": decision.request.contract, "x": x, "scheme": scheme, "n": size[0], "k": size[1]}
    rounded = {str(rows): round(value, 2) for rows, value in ratios.items()}
    _cells.append({**about, "threads": torch.get_num_threads(), "against": decision.kernel.name, "ratios": rounded})


def write_cells(path: Path) -> None:
    """Add the cells to a table."""
    from qcore_cpu import native

    before = json.loads(path.read_text("utf-8")) if path.exists() else {"cells": [], "measured": []}
    if path.stem != native.isa():
        raise SystemExit(f"{path}: the instruction set in use is {native.isa()}; its table is {native.isa()}.json.")
    kept = [cell for cell in before["cells"] if cell["threads"] != torch.get_num_threads()]
    measured = [line for line in before["measured"] if line["threads"] != torch.get_num_threads()]
    about = {"date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "machine": machine(), "torch": torch.__version__}
    lines = ",\n  ".join(json.dumps(cell) for cell in (*kept, *_cells))
    facts = json.dumps([*measured, {"threads": torch.get_num_threads(), **about}])
    path.write_text(f'{{"measured": {facts},\n "cells": [\n  {lines}\n]}}\n', encoding="utf-8")


def by_both(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module] | None:
    """A quantized layer by qcore-cpu and by the built-in kernels; None if the plugin refuses it."""
    made = []
    for plugins in (["cpu", "torch"], ["torch"]):
        with qcore.using(plugins):
            made.append(make())
    decision = made[0].decision
    return (made[0], made[1]) if decision is not None and decision.plugin == "cpu" else None


def quantized(n: int, k: int, scheme: str, dtype: torch.dtype) -> qcore.QTensor:
    """A random weight; by the cheapest quantizer, since its values do not matter."""
    weight = qcore.Scheme.parse(scheme).weight
    quantizer = "absmax" if weight.zero is qcore.ZeroPoint.NONE else "minmax"
    return qcore.quantize((torch.randn(n, k) * 0.02).to(dtype), weight, quantizer)


def ratio(pair: tuple[Callable[..., object], Callable[..., object]], x: torch.Tensor, seconds: float) -> float:
    """Time of the second over that of the first."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best = [math.inf, math.inf]
    for layer in pair:
        layer(x)
    end = time.perf_counter() + seconds
    for turn in range(REPEATS):
        for i, layer in enumerate(pair):
            start = clock()
            layer(x)
            best[i] = min(best[i], clock() - start)
        if turn >= 2 and time.perf_counter() > end:
            break
    return best[1] / best[0]


def linear_rows(dtype: str, seconds: float) -> Iterator[list[str]]:
    """One row per scheme and shape."""
    for n, k in SHAPES:
        for scheme in LINEAR:
            weight = quantized(n, k, scheme, DTYPES[dtype])
            make = functools.partial(QuantizedLinear.from_qtensor, weight, None, scheme, dtype=DTYPES[dtype])
            pair = by_both(make)
            if pair is None:
                continue
            found = [ratio(pair, torch.randn(m, k).to(DTYPES[dtype]), seconds) for m in ROWS]
            note(pair, dtype, scheme, (n, k), dict(zip(ROWS, found, strict=True)))
            yield [dtype, f"{n}x{k}", scheme, *(f"{value:.2f}" for value in found)]


def conv_rows(dtype: str, seconds: float) -> Iterator[list[str]]:
    """One row per scheme, over images."""
    for scheme in CONV:
        found = []
        for channels, side, out, kernel in IMAGES:
            weight = quantized(out, kernel * kernel * channels, scheme, DTYPES[dtype])
            sizes = {"in_channels": channels, "kernel_size": kernel, "padding": kernel // 2, "dtype": DTYPES[dtype]}
            pair = by_both(functools.partial(QuantizedConv2d.from_qtensor, weight, None, scheme, **sizes))
            x = torch.randn(1, channels, side, side).to(DTYPES[dtype]).to(memory_format=torch.channels_last)
            if pair is None:
                found.append("refused")
                continue
            value = ratio(pair, x, seconds)
            note(pair, dtype, scheme, (out, kernel * kernel * channels), {side * side: value})
            found.append(f"{value:.2f}")
        yield [dtype, scheme, *found]


def embedding_rows(dtype: str, seconds: float) -> Iterator[list[str]]:
    """One row per scheme."""
    for scheme in ("w8a16", "w4a16-g32", "w4a16-g32-asym"):
        weight = quantized(32000, 2048, scheme, DTYPES[dtype])
        pair = by_both(functools.partial(QuantizedEmbedding.from_qtensor, weight, dtype=DTYPES[dtype]))
        if pair is not None:
            found = [ratio(pair, torch.randint(0, 32000, (m,)), seconds) for m in ROWS]
            note(pair, dtype, scheme, (32000, 2048), dict(zip(ROWS, found, strict=True)))
            yield [dtype, scheme, *(f"{value:.2f}" for value in found)]


def main() -> None:
    """Measure what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each cell, at least")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, help="JSON file named after the instruction set, to be added to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = args.dtypes.split(",")
    images = [f"{c}->{o}@{s} {k}x{k}" for c, s, o, k in IMAGES]
    parts = [
        ("linear", ["x", "(N, K)", "scheme", *(f"M={m}" for m in ROWS)], linear_rows),
        ("conv2d", ["x", "scheme", *images], conv_rows),
        ("embedding", ["x", "scheme", *(f"rows {m}" for m in ROWS)], embedding_rows),
    ]
    with torch.inference_mode():
        text = header("qcore-cpu beside the built-in kernels") + "\n"
        for title, columns, rows in parts:
            text += (
                f"\n## {title}\n\n{markdown(columns, [row for name in names for row in rows(name, args.seconds)])}\n"
            )
    print(text)
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    if args.table:
        write_cells(args.table)


if __name__ == "__main__":
    main()
