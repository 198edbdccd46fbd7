"""What the CUDA benchmark measures beside the products: host time, memory, a convolution, cold starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _cuda_problem import BF16, DEVICE, OURS, SCHEMES, Problem, UnservedError
from _cuda_timing import Call, Replay, host_times, in_turns
from torch import Tensor, nn
from torch.nn import functional as F

import qcore
from qcore.nn import QuantizedConv2d, QuantizedLinear

Row = tuple[str, ...]

MIB = 1 << 20
LLAMA_8B = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096), (4096, 128256))
"""(K, N) of the different linear layers."""
CONV_SCHEMES = ("w8a8-static(0.04,0)", "w8a8", "w8a16")
COLD_ROWS = (1, 16, 64, 512)
COLD_LIMITS = {"empty": 20.0, "filled": 2.0}
"""Seconds to the results of every layer at one row, by the state of Triton's cache."""


def layers(problem: Problem) -> dict[str, QuantizedLinear]:
    made = {s: QuantizedLinear.from_qtensor(problem.quantized(s), scheme=s, dtype=BF16) for s in SCHEMES}
    return {s: layer for s, layer in made.items() if _kernel(layer).name.startswith(OURS)}


def host_time(problem: Problem, rows: int = 1) -> dict[str, float]:
    """Microseconds that the host spends on one eager call: `F.linear`, whole layers, and their kernels alone."""
    x, weight = problem.x(rows), problem.weight
    dense = nn.Linear(problem.k, problem.n, bias=False, device=DEVICE, dtype=BF16)
    calls: dict[str, Call] = {"bf16 F.linear": lambda: F.linear(x, weight), "bf16 torch.nn.Linear": lambda: dense(x)}
    for scheme, layer in layers(problem).items():
        kernel, packed = _kernel(layer), _kernel(layer).pack(problem.quantized(scheme))
        calls[f"layer {scheme}"] = lambda layer=layer: layer(x)
        calls[f"kernel {scheme}"] = lambda kernel=kernel, packed=packed: kernel(x, packed, None)
    return dict(zip(calls, host_times(list(calls.values())), strict=True))


def memory(problem: Problem, rows: tuple[int, ...] = (1, 2048)) -> list[Row]:
    """MiB of the weight, and beyond inputs and results at the peak of a call."""
    found = [("bf16 F.linear", f"{problem.weight.nbytes / MIB:.1f}", *(_peak(problem, rows, None)))]
    for scheme, layer in layers(problem).items():
        packed = sum(b.nbytes for b in layer.buffers())
        found.append((scheme, f"{packed / MIB:.1f}", *_peak(problem, rows, layer)))
    return found


def _peak(problem: Problem, rows: tuple[int, ...], layer: nn.Module | None) -> list[str]:
    cells = []
    for m in rows:
        x = problem.x(m)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = F.linear(x, problem.weight) if layer is None else layer(x)
        torch.cuda.synchronize()
        cells.append(f"{(torch.cuda.max_memory_allocated() - before - y.nbytes) / MIB:.1f}")
    return cells


def convolution(channels: int = 256, size: int = 56, batch: int = 32) -> tuple[dict[str, float], list[Row]]:
    """Ratios to cuDNN in bfloat16, and the lines of a table: a 3 x 3 kernel, channels last."""
    torch.backends.cudnn.benchmark = True
    x = torch.randn(batch, channels, size, size, device=DEVICE, dtype=BF16).to(memory_format=torch.channels_last)
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False, device=DEVICE, dtype=BF16)
    conv = conv.to(memory_format=torch.channels_last)
    made = {s: QuantizedConv2d.from_float(conv, s) for s in CONV_SCHEMES}
    served = {s: layer for s, layer in made.items() if _kernel(layer).name.startswith(OURS)}
    base, *times = in_turns([Replay([partial(layer, x)]) for layer in (conv, *served.values())])
    ratios = {s: base / us for s, us in zip(served, times, strict=True)}
    rows = [("cuDNN bf16", "-", f"{base:.1f}", "1.00", "-")]
    for scheme, layer in made.items():
        us = f"{base / ratios[scheme]:.1f}" if scheme in ratios else "not measured: not of the plugin"
        ratio = f"{ratios[scheme]:.2f}" if scheme in ratios else ""
        rows.append((scheme, _kernel(layer).name, us, ratio, f"{_conv_error(layer, x[:2]):.1e}"))
    return ratios, rows


def _kernel(layer: Any) -> Any:
    return layer.decision.kernel


def _conv_error(layer: QuantizedConv2d, x: Tensor) -> float:
    """Against a convolution in float64 with the dequantized weight."""
    dense = layer.weight.dequantize(torch.float64).view(layer.out_channels, 3, 3, -1).permute(0, 3, 1, 2)
    expected = F.conv2d(x.double(), dense, padding=1)
    return float((layer(x).double() - expected).norm() / expected.norm())


def cold_starts(scheme: str = "w4a16-g128") -> list[Row]:
    """Seconds from resolving to results in fresh processes: caches of Triton and qcore empty, then filled."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        environ = {n: v for n, v in os.environ.items() if not n.startswith(("QCORE_", "TRITON_"))}
        environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "QCORE_CACHE_DIR": f"{folder}/qcore"}
        for state, limit in COLD_LIMITS.items():
            code = [sys.executable, str(Path(__file__).with_name("cuda_linear.py")), "--cold-child", scheme]
            run = subprocess.run(code, check=True, stdout=subprocess.PIPE, text=True, env=environ)  # noqa: S603
            times = json.loads(run.stdout.splitlines()[-1])
            mark = "yes" if times["1"] <= limit else "**no**"
            found.append((scheme, state, f"{limit:.0f}", mark, *(f"{times[str(m)]:.2f}" for m in COLD_ROWS)))
    return found


def cold_child(scheme: str) -> None:
    """Print seconds, since qcore was first asked for a kernel, until every layer has given a result, by row count."""
    weights = {size: Problem(*size).quantized(scheme) for size in LLAMA_8B}
    inputs = {m: {k: torch.randn(m, k, device=DEVICE, dtype=BF16) for k, _ in LLAMA_8B} for m in COLD_ROWS}
    for n, k in ((4096, 4096), (1024, 4096)):  # cuBLAS has a start of its own
        F.linear(inputs[1][4096], torch.zeros(n, k, device=DEVICE, dtype=BF16))
    torch.cuda.synchronize()
    start, times = time.perf_counter(), {}
    with torch.no_grad():
        model = {s: QuantizedLinear.from_qtensor(w, scheme=scheme, dtype=BF16) for s, w in weights.items()}
        for m in COLD_ROWS:
            for (k, _), layer in model.items():
                layer(inputs[m][k])
            torch.cuda.synchronize()
            times[m] = time.perf_counter() - start
    served = {_kernel(layer).name for layer in model.values()}
    if not all(name.startswith(OURS) for name in served):
        raise UnservedError(f"served by {served}")
    print(json.dumps(times))


def plugin_version() -> str:
    """What qcore says about the plugin."""
    found = [status for status in qcore.plugins() if status.name == "cuda"]
    return f"qcore-cuda {found[0].version}, {found[0].state}" if found else "qcore-cuda is not installed"
