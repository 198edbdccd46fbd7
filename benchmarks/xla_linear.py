"""Quantized linears on XLA beside bfloat16 ``F.linear``, on the CPU or (``--device cuda``) on an NVIDIA GPU.

On the CPU: whole calls, in turns with ``F.linear`` and with the kernel of torch's own that would serve; weights rotate
through copies that exceed the cache. Beside it what XLA allocates beyond arguments and results, as a part of the
dequantized weight; and what a call costs whose product costs next to nothing.

On a GPU: the device's time. Several products, each with another weight, are one program of XLA's, so launching and the
bridge nearly drop out; ``F.linear`` runs in a CUDA graph. Ratios above 1 are faster than ``F.linear``; in brackets the
part of the read bandwidth that the weight's bytes alone would take. A whole call, bridge included, stands below.
``--output FILE`` also writes the result.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _table import header, markdown
from torch import Tensor
from torch.nn import functional as F

import qcore
from qcore.contracts import LINEAR

SCHEMES = {
    "cpu": ("w8a16", "w8a16-g32", "w4a16", "w4a16-g128", "w4a16-g32", "w8a8", "w8a8-g64", "w4a8", "w4a8-g32"),
    "cuda": ("w8a16", "w4a16-g128", "w8a8"),
}
SHAPES = {"cpu": "4096x4096", "cuda": "4096x4096,4096x14336,8192x8192,8192x28672"}
"""K x N, as tables of layers have them."""
ROWS = {"cpu": "1,16,128", "cuda": "1,16,256,2048"}
ROUNDS = 9
SPREAD = 256 << 20
"""Bytes that the copies of one weight take together on a GPU: several times its cache."""


def kernel_of(scheme: str, n: int, k: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The plugin's kernel for activations of ``dtype``."""
    from qcore_xla.kernels.linear import XlaLinear

    return XlaLinear(LINEAR.request_for(qcore.Scheme.parse(scheme), torch.device(device), dtype, n, k))


def asked(kernel: Any, x: Tensor, packed: dict[str, Tensor]) -> tuple[Any, Any, list[Any]]:
    """Function, form and arrays of what an engine is asked to run for a call."""
    import jax

    from qcore_xla import calls

    n, k, scheme, out_dtype = kernel._constants  # noqa: SLF001
    call = calls.call_of(x.device, n, k, scheme, 1, out_dtype)
    function, form, tensors, _ = calls.prepared(x, calls.Weight.of(packed), None, calls.Given(), call)
    return function, form, [None if t is None else jax.dlpack.from_dlpack(t) for t in tensors]


# --- the CPU


def cpu_table(n: int, k: int, rows: int, seconds: float) -> Iterator[tuple[str, ...]]:
    """One line per scheme: milliseconds, ratios, and memory."""
    from cpu_linear import dense, quantized, quiet_medians

    x = torch.randn(rows, k).bfloat16()
    for scheme in SCHEMES["cpu"]:
        kernel = kernel_of(scheme, n, k, "cpu")
        weight = qcore.quantize(torch.randn(n, k), kernel.format, "absmax")
        packs = [kernel.pack(weight) for _ in range(max(2, math.ceil((96 << 20) / weight.nbytes)))]
        turn = iter(range(1 << 30))
        name, own = quantized(scheme, n, k, torch.bfloat16)
        calls = [
            partial(dense(n, k, torch.bfloat16), x),
            lambda k=kernel, p=packs, t=turn: k(x, p[next(t) % len(p)], None),
        ]
        base, ours, theirs = quiet_medians([*calls, partial(own, x)], seconds)
        extra = temporary_bytes(*asked(kernel, x, packs[0]))
        part = f"{extra / 2**20:.1f} ({extra / (2 * n * k):.0%})"
        yield (scheme, f"{ours:.2f}", f"{base / ours:.2f}", part, name, f"{base / theirs:.2f}")


def temporary_bytes(function: Any, form: Any, arrays: list[Any]) -> int:
    """What the compiled program allocates beside arguments and result."""
    import jax

    compiled = jax.jit(partial(function, form=form)).lower(*arrays).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def overhead(device: str) -> tuple[float, float]:
    """Microseconds of a whole call whose product costs next to nothing, and of JAX alone in it."""
    import jax

    kernel = kernel_of("w8a16", 64, 128, device)
    packed = kernel.pack(qcore.quantize(torch.randn(64, 128), kernel.format, "absmax").to(device))
    x = torch.randn(1, 128, device=device).bfloat16()
    function, form, arrays = asked(kernel, x, packed)
    alone = jax.jit(partial(function, form=form))
    return fastest(lambda: kernel(x, packed, None)), fastest(lambda: alone(*arrays).block_until_ready())


def fastest(call: Callable[[], Any]) -> float:
    """Microseconds: the best of several medians."""
    medians = []
    for _ in range(ROUNDS):
        times = []
        for _ in range(200):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times) * 1e6)
    return min(medians)


def told(device: str) -> str:
    """The line on what a call costs."""
    whole, alone = overhead(device)
    return f"- A call whose product costs next to nothing: {whole:.0f} us, of which JAX alone takes {alone:.0f}"


def cpu(options: argparse.Namespace) -> Iterator[str]:
    torch.set_num_threads(options.threads)
    yield told("cpu")
    columns = (
        "scheme",
        "ms",
        "ratio to bfloat16",
        "MiB beside arguments (of the weight in bfloat16)",
        "torch's",
        "ratio",
    )
    for shape in options.shapes.split(","):
        k, n = map(int, shape.split("x"))
        for rows in map(int, options.rows.split(",")):
            yield f"\n## K x N = {k} x {n}, M = {rows}\n\n{markdown(columns, cpu_table(n, k, rows, options.seconds))}"


# --- a GPU


def copies(nbytes: int) -> int:
    """How many copies of a weight exceed the cache, and make launching a program small beside running it."""
    return min(24, max(8, math.ceil(SPREAD / nbytes)))


def program(scheme: str, n: int, k: int, rows: int) -> tuple[Callable[[], Any], int, float]:
    """A compiled program of several products with a weight each, how many, and the bytes of one weight."""
    import jax

    kernel = kernel_of(scheme, n, k, "cuda")
    weight = qcore.quantize(torch.randn(n, k, device="cuda"), kernel.format, "absmax")
    count = copies(weight.nbytes)
    xs = [torch.randn(rows, k, device="cuda").bfloat16() for _ in range(count)]
    packed = kernel.pack(weight)
    packs = [packed, *({name: t.clone() for name, t in packed.items()} for _ in range(count - 1))]
    inputs = [asked(kernel, x, pack) for x, pack in zip(xs, packs, strict=True)]
    function, form, _ = inputs[0]

    def several(many: list[list[Any]]) -> list[Any]:
        return [function(*arrays, form=form) for arrays in many]

    many = [arrays for _, _, arrays in inputs]
    compiled = jax.jit(several).lower(many).compile()
    compiled(many)
    return lambda: compiled(many), count, weight.nbytes


def gpu_us(run: Callable[[], Any], count: int) -> float:
    """Microseconds of one product: the fastest of several bursts, in which the host runs ahead of the device."""
    import jax

    jax.block_until_ready(run())
    best, turns = math.inf, 12
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(turns):
            last = run()
        jax.block_until_ready(last)
        best = min(best, (time.perf_counter() - start) / turns)
    return best / count * 1e6


def dense_us(n: int, k: int, rows: int) -> float:
    """Microseconds of bfloat16 ``F.linear``."""
    from _cuda_timing import Replay, in_turns

    count = copies(2 * n * k)
    x = torch.randn(rows, k, device="cuda").bfloat16()
    weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(count)]
    (found,) = in_turns([Replay([partial(F.linear, x, w) for w in weights])])
    return found


def cuda(options: argparse.Namespace) -> Iterator[str]:
    import jax
    from _cuda_timing import read_bandwidth

    speed = read_bandwidth()
    yield f"- jax {jax.__version__}; read bandwidth measured in this run: {speed / 1e12:.2f} TB/s"
    rows = [int(count) for count in options.rows.split(",")]
    cells = [
        (*map(int, s.split("x")), scheme, m)
        for s in options.shapes.split(",")
        for scheme in SCHEMES["cuda"]
        for m in rows
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = {cell: pool.submit(program, cell[2], cell[1], cell[0], cell[3]) for cell in cells}
    lines: dict[tuple[int, int, str], list[str]] = {}
    base = {(k, n, m): dense_us(n, k, m) for k, n, _, m in cells}
    for k, n, scheme, m in cells:
        run, count, nbytes = made.pop((k, n, scheme, m)).result()
        us = gpu_us(run, count)
        text = f"{base[k, n, m] / us:.2f} ({nbytes / speed * 1e6 / us:.0%})"
        lines.setdefault((k, n, scheme), [f"{k},{n}", scheme]).append(text)
    columns = ("K,N", "scheme", *(f"M={m}" for m in rows))
    yield f"\n{markdown(columns, lines.values())}"
    yield "\n" + told("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", help="KxN,...")
    parser.add_argument("--rows", help="M,...")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="per cell, on the CPU")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.shapes = options.shapes or SHAPES[options.device]
    options.rows = options.rows or ROWS[options.device]
    parts = [header(f"Quantized linears on XLA, device {options.device}")]
    print(parts[0])
    with torch.no_grad():
        for part in (cuda if options.device == "cuda" else cpu)(options):
            print(part, flush=True)
            parts.append(part)
    if options.output:
        options.output.write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
