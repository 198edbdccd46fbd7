"""Time every kernel that supports a layer on this machine against the dense layer of the same dtype.

Calls are interleaved and times are medians. The ratio is the speedup over dense. GB/s counts the packed weight, x and
the result; the last column is its share of the measured memory bandwidth, which weights that fit into a cache can
exceed.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import dtype_name
from . import arguments
from .output import CommandResult, Table, size
from .progress import Progress

NAME = "bench"
HELP = "compare the speed of the kernels with the dense layer"
EXAMPLES = (
    "qcore bench --n 1024 --k 1024 --rows 1,16",
    "qcore bench --scheme w4a16-g128 --scheme w8a8 --dtype float32 --json",
)
_HEADER = ("scheme", "rows", "kernel", "ms", "dense ms", "ratio", "weight", "GB/s", "of memory")


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``qcore bench``."""
    arguments.add_measured(parser)
    arguments.add_sizes(parser)
    arguments.add_device_and_dtype(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Measure one weight after another."""
    import torch

    from .measuring import cases, left_out_notes
    from .timing import bandwidth, slow_notes, time_case

    measured = cases(args.scheme, [(args.n, args.k)], args.device, args.dtype)
    speed = bandwidth(args.device)
    rows: list[dict[str, Any]] = []
    steps = [(case, m) for case in measured for m in args.rows]
    with Progress("measuring", unit="cases").shown() as progress:
        for done, (case, m) in enumerate(steps):
            progress(done, len(steps), f"{case.scheme}, {m} rows")
            rows += time_case(case, m, args.seconds, speed)
    machine = f"{dtype_name(args.dtype)} on {args.device}, {torch.get_num_threads()} threads"
    head = f"N={args.n} K={args.k}, {machine}, memory {speed / 1e9:.1f} GB/s"
    data = {"n": args.n, "k": args.k, "dtype": dtype_name(args.dtype), "device": str(args.device)}
    data |= {"threads": torch.get_num_threads(), "bytes_per_second": speed, "rows": rows}
    table = Table(_HEADER, [_cells(row) for row in rows], right=frozenset({1, 3, 4, 5, 6, 7, 8}))
    return CommandResult(data, [head, "", table, *slow_notes(rows), *left_out_notes(measured)])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["scheme"],
        str(row["m"]),
        row["kernel"],
        f"{row['milliseconds']:.3f}",
        f"{row['dense_milliseconds']:.3f}",
        f"{row['ratio']:.2f}x",
        size(row["weight_bytes"]),
        f"{row['bytes_per_second'] / 1e9:.1f}",
        f"{row['of_bandwidth']:.0%}",
    )
