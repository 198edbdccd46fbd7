"""Quantized linears on a Vulkan device, by the device's own timestamps.

    python benchmarks/vulkan_linear.py [--device NAME] [--output benchmarks/results/DATE-vulkan-DEVICE.md]

Prints Markdown. A product is timed with x and result in device memory, as inside a chain; copies of the weight take
turns, so that no cache holds it. *Kernel* is the product's own dispatch with the barrier before it, *whole* adds the
preparation of x (quantizing, padding, splitting) and the sum of parts of K or terms of x. A while of heavy work comes
before each, because the clocks of an idle GPU are low. *Roof*: the longer of the times that the weight's bytes and
the operations need at the rates below, over the kernel's time. *Error*: the largest error over the largest that the
contract allows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _table import header, markdown

from qcore import Format, LinearRequest, QTensor, Scheme, quantize
from qcore.contracts import Problem as ContractProblem
from qcore.contracts.linear import LINEAR
from qcore_vulkan import device as devices
from qcore_vulkan import native, steps
from qcore_vulkan.builder import Builder, Place, Program, Ref
from qcore_vulkan.device import Buffer, Device
from qcore_vulkan.layout import DeviceWeight, upload
from qcore_vulkan.steps import Rows, selection
from qcore_vulkan.steps.product import GemmProblem, tile

DTYPE = torch.bfloat16
_CACHES = 240 << 20
"""Bytes of copies of a weight that take turns: several times the second-level cache of any device."""

_WARM = 0.3
"""Seconds of work before a program is timed."""

RATES = {"NVIDIA H200": {"read": 4.05, "matrix f16": 620.0, "matrix int8": 1270.0, "dot": 134.0, "float32": 67.0}}
"""Tera bytes or operations a second, measured through Vulkan: reading 117 MB, matrices in registers; the last two are
lanes times clock: 64 dot products of four and 128 multiply-adds for each core and cycle."""


@dataclass(frozen=True)
class Cell:
    """A product to time.

    **Fields:** ``units``: "any", "dot" (no cooperative matrices) or "none" (no integer dot products either);
    ``target`` and ``peer`` (llama.cpp): microseconds, or tera operations a second where M is large.
    """

    scheme: str
    m: int
    k: int
    n: int
    units: str = "any"
    target: float | None = None
    peer: str = "-"
    dtype: torch.dtype = DTYPE


LARGE = (14336, 4096)
GPU = (
    Cell("w4a16-g128", 1, *LARGE, target=14, peer="14.0"),
    Cell("w8a16", 1, *LARGE, target=22, peer="28.9"),
    Cell("w8a8", 1, *LARGE),
    Cell("w4a16-g128", 1, 28672, 8192, target=48.9),
    Cell("w8a16", 1, 28672, 8192, target=93.5),
    Cell("w4a16-g128", 8, *LARGE, target=25, peer="60"),
    Cell("w8a8", 8, *LARGE, target=30, peer="64"),
    Cell("w4a8-g128", 8, *LARGE),
    Cell("w8a16", 8, *LARGE),
    Cell("w4a16-g128", 512, *LARGE, target=110, peer="95"),
    Cell("w8a16", 512, *LARGE),
    Cell("w8a8", 512, *LARGE, target=200, peer="80"),
    Cell("w4a8-g128", 512, *LARGE),
    Cell("w8a8", 512, *LARGE, "dot", 45, "39"),
    Cell("w4a8-g128", 512, *LARGE, "dot", 45, "30"),
    Cell("w4a16-g128", 512, *LARGE, "none", 28, "28"),
    *(Cell("w4a16-g128", m, *LARGE, dtype=torch.float32) for m in (1, 8, 64, 512)),
    *(
        Cell(scheme, m, *LARGE, units, dtype=dtype)
        for scheme in ("wnf4a16-g64", "wfp8a16")
        for dtype in (torch.float32, DTYPE)
        for m in (2, 8, 64, 512)
        for units in ("any", "none")
    ),
)
CPU = (
    Cell("w8a8", 128, 1024, 1024),
    Cell("w8a16", 128, 1024, 1024),
    Cell("w4a16-g128", 128, 1024, 1024),
    Cell("w4a8-g128", 128, 1024, 1024),
    Cell("w8a8", 1, 1024, 1024),
    Cell("w8a16", 1, 1024, 1024),
    Cell("w4a16-g128", 1, 1024, 1024),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="its index or a part of its name")
    parser.add_argument("--select", default="", help="only cases whose name has this word")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no further cell is begun")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = devices.get(options.device)
    text = report(device, time.perf_counter() + options.budget, options.select)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


def report(device: Device, deadline: float, word: str = "") -> str:
    d = device.description
    facts = f"\n- Device: {d.name} ({d.type}), driver {d.driver_name} {d.driver_info}, Vulkan {d.api_version}"
    rates = RATES.get(d.name, {})
    facts += "".join(f"\n- Roof, {name}: {rate:g} T/s" for name, rate in rates.items())
    torch.manual_seed(0)
    clock, rows = Clock(device), {}
    cells = [cell for cell in (GPU if device.profile == "gpu" else CPU) if word in _name(cell)]
    weights = None
    for cell in sorted(cells, key=_weight):  # each weight is made once
        if time.perf_counter() > deadline:
            rows[cell] = [_name(cell), "left out: the budget was spent", *["-"] * 7]
            continue
        if weights is None or weights.key != _weight(cell):
            weights = Weights(device, _weight(cell))
        rows[cell] = _row(device, clock, cell, weights)
    columns = ("case", "kernel", "kernel us", "rate", "roof", "whole us", "target", "llama.cpp", "error")
    calls = markdown(("call", "host us", "device us"), _calls(device, clock))
    return "\n".join(
        [header("Vulkan: quantized linears") + facts, "", markdown(columns, [rows[cell] for cell in cells]), "", calls]
    )


def _weight(cell: Cell) -> tuple[str, int, int]:
    return str(Scheme.parse(cell.scheme).weight), cell.k, cell.n


def _name(cell: Cell) -> str:
    units = {"any": "", "dot": ", no matrices", "none": ", neither"}[cell.units]
    return f"{cell.scheme} M={cell.m} K={cell.k} N={cell.n}{units}{', float32' * (cell.dtype == torch.float32)}"


class Weights:
    """A weight of random codes, and copies of it on the device: as many as overflow every cache."""

    def __init__(self, device: Device, key: tuple[str, int, int], copies: int | None = None):
        self.key = key
        fmt, (_, k, n) = Format.parse(key[0]), key
        if fmt.element.is_integer:
            low, high = fmt.code_range
            codes = torch.randint(low, high + 1, (n, k), dtype=torch.int8)
            self.tensor = QTensor.from_codes(codes, torch.rand(fmt.groups(k), n) * 0.01 + 0.002, None, fmt)
        else:
            self.tensor = quantize(torch.randn(n, k) * 0.02, fmt)
        first = upload(device, self.tensor)
        count = max(2, -(-_CACHES // first.nbytes)) if device.profile == "gpu" else 2
        self.copies = [first, *(_clone(device, first) for _ in range((copies or count) - 1))]


def _clone(device: Device, weight: DeviceWeight) -> DeviceWeight:
    return replace(weight, parts=tuple(replace(part, codes=_copy(device, part.codes)) for part in weight.parts))


def _copy(device: Device, buffer: Buffer) -> Buffer:
    copy, b = device.alloc(buffer.nbytes), Builder(device)
    b.copy(Ref(buffer, 0, buffer.nbytes), Ref(copy, 0, buffer.nbytes))
    b.program().run([], [])
    return copy


class Only(Builder):
    """Records the steps of one variant alone; what the others made is in scratch memory, if they have just run."""

    variant = ""

    def dispatch(self, variant: str, *args: Any, **options: Any) -> None:
        if variant == self.variant:
            super().dispatch(variant, *args, **options)

    def copy(self, *args: Any, **options: Any) -> None:
        pass


def _row(device: Device, clock: Clock, cell: Cell, weights: Weights) -> list[str]:
    scheme, geometry = Scheme.parse(cell.scheme), weights.copies[0].geometry
    problem = GemmProblem.of(scheme.activation, cell.m, geometry, (cell.dtype, cell.dtype))
    kernel: Any = tile(device, problem.op, cell.m, geometry, 1)
    if device.profile == "gpu":
        kernel = selection.choose(device, problem) if cell.units == "any" else _poorer(device, problem, cell.units)
        selection.prefer(device, problem, kernel)
    x = torch.randn(cell.m, cell.k).to(cell.dtype)
    count = max(1, 24 // len(weights.copies)) * len(weights.copies) if cell.m <= 16 else len(weights.copies)
    y = torch.empty(cell.m, cell.n, dtype=cell.dtype)
    every = _record(Builder(device), cell, weights, count)
    whole = clock.median(every, [x], [y]) / count
    only = Only(device)
    only.variant = kernel.variant
    alone = clock.median(_record(only, cell, weights, count), [x], [torch.empty_like(y)], after=every) / count
    selection.forget(device, problem)
    rates = RATES.get(device.description.name, {})
    return _cells(cell, kernel, weights.copies[0].nbytes, rates, alone, whole, _error(cell, weights, x, y))


def _poorer(device: Device, problem: GemmProblem, units: str) -> Any:
    """The kernel for a device without cooperative matrices, and without integer dot products."""
    features = {**device.description.features, "integer_dot": units == "dot"}
    poorer = replace(device.description, cooperative_matrix=(), features=features)
    for kernel in selection.candidates(poorer, problem):
        try:
            device.pipeline(kernel.variant, kernel.constants(problem.geometry), kernel.subgroup)
        except native.Unsupported:
            continue
        return kernel
    raise RuntimeError(f"no kernel for {problem}")


def _record(b: Builder, cell: Cell, weights: Weights, count: int) -> Program:
    """``count`` products of the same x, one after another."""
    activation = Scheme.parse(cell.scheme).activation
    x, y = _rows(b, cell.m, cell.k, cell.dtype), _rows(b, cell.m, cell.n, cell.dtype)
    given, result = b.input(x.ref.bytes), b.output(y.ref.bytes)
    b.copy(given, x.ref)
    for i in range(count):
        mark = b.mark()
        steps.linear(b, x, weights.copies[i % len(weights.copies)], None, activation, None, cell.dtype, out=y.ref)
        b.rewind(mark)
    b.copy(y.ref, result)
    return b.program([_place(replace(x, ref=given))], [_place(replace(y, ref=result))], timed=True)


def _rows(b: Builder, rows: int, columns: int, dtype: torch.dtype) -> Rows:
    ref = b.scratch(steps.rows_bytes(rows, columns, dtype))
    return Rows(ref, rows, columns, steps.rows_pitch(columns, dtype), dtype)


def _place(x: Rows) -> Place:
    return Place(x.ref, x.rows, x.columns * x.dtype.itemsize, x.pitch * x.dtype.itemsize)


class Clock:
    """Times programs after a while of heavy work; light work leaves the clocks of an idle GPU as they are."""

    def __init__(self, device: Device):
        cell = Cell("w4a16-g128", 512, 4096, 4096)
        self.work: list[Program] = []
        if device.profile == "gpu":
            self.work.append(_record(Builder(device), cell, Weights(device, _weight(cell), copies=1), 16))
        self.x = torch.randn(cell.m, cell.k).to(cell.dtype)
        self.y = torch.empty(cell.m, cell.n, dtype=cell.dtype)

    def median(
        self, program: Program, inputs: list[torch.Tensor], outputs: list[torch.Tensor], runs: int = 9,
        after: Program | None = None,
    ) -> float:  # fmt: skip
        """Microseconds on the device; ``after``: a program whose scratch memory this one reads."""
        end = time.perf_counter() + _WARM
        while self.work and time.perf_counter() < end:
            self.work[0].run([self.x], [self.y])
        if after is not None:
            after.run(inputs, outputs)
        for _ in range(3):
            program.run(inputs, outputs)
        return statistics.median(program.run(inputs, outputs) or 0.0 for _ in range(runs))


def _error(cell: Cell, weights: Weights, x: torch.Tensor, y: torch.Tensor) -> float:
    """Of the first columns and rows, by the contract."""
    scheme, n, m = Scheme.parse(cell.scheme), min(cell.n, 64), min(cell.m, 64)
    cpu = torch.device("cpu")
    request = LinearRequest(
        cpu, cell.dtype, cell.dtype, n, cell.k, None, scheme.weight, scheme.activation, None, False, False
    )
    problem = ContractProblem(request, x[:m], weights.tensor.narrow(0, 0, n))
    return LINEAR.judge(problem, y[:m, :n].contiguous()).worst


_UNIT = {
    "coop_f16": "matrix f16",
    "coop_fragments": "matrix f16",
    "coop_int8": "matrix int8",
    "gemm_int_shared_dot": "dot",
}


def _cells(
    cell: Cell, kernel: Any, nbytes: int, rates: dict[str, float], alone: float, whole: float, error: float
) -> list[str]:
    tera = 2e-6 * cell.m * cell.k * cell.n
    peak = rates.get(_UNIT.get(kernel.variant, "float32" if "float" in kernel.variant else ""), float("inf"))
    work = tera * getattr(kernel, "terms", 1)
    roof = f"{max(nbytes * 1e-6 / rates['read'], work / peak) / alone:.0%}" if rates else "-"
    speed, unit_ = (tera / alone, "op/s") if cell.m > 16 else (nbytes / alone * 1e-6, "B/s")
    rate = f"{speed:.3g} T{unit_}" if speed > 0.5 else f"{speed * 1e3:.3g} G{unit_}"
    target = "-" if cell.target is None else f"{cell.target:g}{' T/s' if cell.m > 16 else ' us'}"
    times = (f"{alone:.1f}", rate, roof, f"{whole:.1f}")
    return [_name(cell), f"{kernel.variant} {_words(kernel)}", *times, target, cell.peer, f"{error:.2f}"]


def _words(kernel: Any) -> str:
    """The sizes of a kernel."""
    shape = getattr(kernel, "shape", kernel)
    names = ("bm", "bn", "m", "n", "kb", "lanes", "r", "rows", "tn", "tm", "digits")
    words = [f"{name}={getattr(shape, name)}" for name in names if hasattr(shape, name)]
    splits = getattr(kernel, "splits", 1)
    return " ".join(words + [f"splits={splits}"] * (splits > 1))


def _calls(device: Device, clock: Clock) -> list[list[str]]:
    """Submitting and waiting: one small linear, and chains."""
    found = []
    for scheme in ("w8a8", "w4a16-g128"):
        weight = upload(device, Weights(device, (str(Scheme.parse(scheme).weight), 1024, 1024)).tensor)
        for layers in (1, 32):
            run, gpu_us = _chain(device, clock, Scheme.parse(scheme), weight, layers)
            each = "" if layers == 1 else f", each of {layers} in a chain"
            found.append([f"{scheme} M=1 K=N=1024{each}", f"{run / layers:.1f}", f"{gpu_us / layers:.1f}"])
    return found


def _chain(device: Device, clock: Clock, scheme: Scheme, weight: DeviceWeight, layers: int) -> tuple[float, float]:
    """Microseconds on the host and on the device."""
    programs = []
    for timed in (False, True):
        b = Builder(device)
        first = replace(_rows(b, 1, 1024, DTYPE), ref=b.input(steps.rows_bytes(1, 1024, DTYPE)))
        x, out = first, b.output(first.ref.bytes)
        for layer in range(layers):
            last = out if layer + 1 == layers else None
            x = steps.linear(b, x, weight, None, scheme.activation, None, DTYPE, out=last)
        programs.append(b.program([_place(first)], [_place(x)], timed=timed))
    given, result = torch.randn(1, 1024).to(DTYPE), torch.empty(1, 1024, dtype=DTYPE)
    gpu_us = clock.median(programs[1], [given], [result], 50)
    return _host(lambda: programs[0].run([given], [result])), gpu_us


def _host(call: Callable[[], object], runs: int = 300) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    main()
