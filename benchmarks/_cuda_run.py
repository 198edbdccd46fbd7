"""The order of the CUDA benchmark: ceilings, extras, then the weights, most wanted rows first, within a budget."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable

import torch
import triton
from _cuda_contest import Ceilings, Contest, chosen
from _cuda_extras import COLD_ROWS, LLAMA_8B, cold_starts, convolution, host_time, memory, plugin_version
from _cuda_problem import Problem
from _cuda_report import Report
from _cuda_timing import multiply_rate, read_bandwidth

Size = tuple[int, int]


def run(options: argparse.Namespace) -> None:
    """Measure everything that ``options`` ask for, and print and write the result."""
    deadline = time.monotonic() + options.budget
    sizes = [(int(k), int(n)) for k, n in (size.split("x") for size in options.shapes.split(","))]
    rows = [int(m) for m in options.rows.split(",")]
    peers, missing = chosen(options.peers)
    report = Report(options.output, options.json)
    ceilings = Ceilings(read_bandwidth(), multiply_rate())
    report.facts += _facts(ceilings, peers, missing)
    try:
        _extras(report, options, sizes[0])
        half = (len(rows) + 1) // 2
        for part in (rows[:half], rows[half:]):
            for size in sizes:
                _size(report, size, part, peers, ceilings, deadline)
    finally:
        report.write()
        print(report.text())


def _facts(ceilings: Ceilings, peers: list[str], missing: list[str]) -> list[str]:
    properties = torch.cuda.get_device_properties(0)
    memory = f"{properties.total_memory / 2**30:.0f} GiB, second-level cache {properties.L2_cache_size / 2**20:.0f} MiB"
    toolkit = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    reads, products = f"{ceilings.bandwidth / 1e12:.2f} TB/s", f"{ceilings.rate / 1e12:.0f} TFLOP/s"
    return [
        f"Device: {properties.multi_processor_count} multiprocessors, {memory}; {toolkit}",
        f"Plugin: {plugin_version()}, triton {triton.__version__}",
        f"Measured in this run: reads {reads}, bf16 products {products}",
        f"Peers: {', '.join(peers) or 'none'}" + (f"; not installed: {', '.join(missing)}" if missing else ""),
    ]


def _extras(report: Report, options: argparse.Namespace, size: Size) -> None:
    if options.extras:
        problem = Problem(*size)
        _guarded(report, "host time", lambda: _host(report, problem))
        _guarded(report, "memory", lambda: _memory(report, problem))
        _guarded(report, "convolution", lambda: _conv(report))
    if options.cold:
        _guarded(report, "cold start", lambda: _cold(report))
    report.write()


def _guarded(report: Report, name: str, step: Callable[[], None]) -> None:
    started = time.monotonic()
    try:
        step()
    except Exception as error:  # noqa: BLE001  the other figures are wanted all the same
        report.notes.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        torch.cuda.synchronize()
    print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def _host(report: Report, problem: Problem) -> None:
    report.host = host_time(problem)
    text = f"Host time of one eager call, {problem.k} x {problem.n}, M = 1; the device is never waited for."
    report.section("Host time", ("call", "us"), [(n, f"{us:.1f}") for n, us in report.host.items()], text)


def _memory(report: Report, problem: Problem) -> None:
    columns = ("", "weight, MiB", "peak at M = 1, MiB", "peak at M = 2048, MiB")
    text = f"Memory, {problem.k} x {problem.n}: peak beyond weight, input and result of one call."
    report.section("Memory", columns, memory(problem), text)


def _conv(report: Report) -> None:
    report.conv, rows = convolution()
    text = "256 -> 256 channels, 3 x 3, 56 x 56, batch 32, channels last; CUDA-graph time."
    report.section("Convolution", ("scheme", "kernel", "us", "ratio", "error"), rows, text)


def _cold(report: Report) -> None:
    sizes = ", ".join(f"{k} x {n}" for k, n in LLAMA_8B)
    text = f"Seconds until one layer of each size ({sizes}) is resolved, verified, packed and has given a result."
    columns = ("scheme", "caches", "limit at M = 1", "met", *(f"and at M = {m}" for m in COLD_ROWS))
    report.section("Cold start", columns, cold_starts(), text)


def _size(report: Report, size: Size, rows: list[int], peers: list[str], ceilings: Ceilings, deadline: float) -> None:
    """All row counts of one weight, as far as there is time."""
    contest: Contest | None = None
    for m in rows:
        started = time.monotonic()
        if started > deadline:
            report.notes.append(f"{size[0]} x {size[1]}, M = {m}: the budget was spent")
            continue
        contest = contest or Contest(size, peers, ceilings)
        report.cells += contest.cells(m)
        print(f"{size[0]} x {size[1]}, M = {m}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    if contest:
        report.notes += contest.notes
        del contest
        gc.collect()
        torch.cuda.empty_cache()
        report.write()
