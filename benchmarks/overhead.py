"""What qcore adds: microseconds per call of a bound layer over the raw torch op, import, discovery and explain times.

    python benchmarks/overhead.py [--save]

Calls take turns and their medians are compared, on one thread. The figures to reach: 5 us per call, 80 ms to import,
100 ms to discover, 50 ms to explain with ten plugins.
"""

# ruff: noqa: ARG002, SLF001 - looks behind the public surface, at what is timed

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _table import header, markdown
from torch import Tensor

import qcore
from qcore.discovery.kernels import Kernel, Packed, RowsKernel

N, K = 16, 16


class OneOp(RowsKernel):
    """The least that a kernel can do: hand x and the packed weight to one torch op."""

    name = "overhead.one_op"
    packing = "torch.plain"

    def __init__(self, request: Any, neutral: Kernel) -> None:
        self.n, self.k, self.out_dtype, self.neutral = request.n, request.k, request.out_dtype, neutral

    def pack(self, weight: qcore.QTensor) -> dict[str, Tensor]:
        return {**self.neutral.pack(weight), "row": weight.scale.view(-1).to(torch.bfloat16)}

    def unpack(self, packed: Packed) -> qcore.QTensor:
        return self.neutral.unpack(packed)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **_given: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, packed["data"], packed["row"])


def rounds(calls: list[Callable[[], Any]], seconds: float = 2.0, burst: int = 50) -> list[float]:
    """Median microseconds of each call; bursts take turns, so that a slow moment hits all alike."""
    times: list[list[float]] = [[] for _ in calls]
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times[0]) < 5:
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            for _ in range(burst):
                call()
            own.append((time.perf_counter() - start) / burst * 1e6)
    return [statistics.median(own) for own in times]


def layer_rows() -> list[tuple[str, ...]]:
    """A layer bound to `OneOp`, its kernel, and the op itself."""
    from types import ModuleType

    from qcore.discovery.registry import registry
    from qcore.resolving.offers import offers_for

    def offer(request: Any) -> Any:
        kernels = [offer.kernel for _, offer in offers_for(request, frozenset({"overhead"}))]
        return qcore.Offer(OneOp(request, next(k for k in kernels if k.name == "torch.plain.linear")))

    plugin = ModuleType("overhead")
    plugin.qcore_linear = qcore.hookimpl(offer)  # type: ignore[attr-defined]
    registry.add("overhead", plugin)
    layer = qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16), "w8a16").eval()
    weight, x = layer.weight._with(), torch.randn(1, K, dtype=torch.bfloat16)
    return _compared(layer, weight, x)


def _compared(layer: Any, weight: qcore.QTensor, x: Tensor) -> list[tuple[str, ...]]:
    packed, kernel = layer._primary.packed, layer._primary.kernel
    data, row, linear = packed["data"], packed["row"], torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
    mm = torch._weight_int8pack_mm
    calls: dict[str, Callable[[], Any]] = {
        "raw op `_weight_int8pack_mm`": lambda: mm(x, data, row),
        "kernel": lambda: kernel(x, packed, None),
        "`layer.forward(x)`": lambda: layer.forward(x),
        "`layer(x)`": lambda: layer(x),
        "`layer(x)`, gradients on": lambda: _with_grad(layer, x),
        "`qcore.linear(x, weight)`": lambda: qcore.linear(x, weight),
        "`torch.nn.Linear`, for comparison": lambda: linear(x),
    }
    with torch.no_grad():
        for call in calls.values():
            call()
        medians = rounds(list(calls.values()))
    return [(name, f"{us:.2f}", f"{us - medians[0]:+.2f}") for name, us in zip(calls, medians, strict=True)]


def _with_grad(layer: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return layer(x)  # type: ignore[no-any-return]


# A full garbage collection of torch's heap takes 70 ms and falls where it likes: it is done before the clock starts.
_START = "import gc, time, warnings\nwarnings.simplefilter('ignore')\nimport torch\ngc.collect()\n"
_START += "t = time.perf_counter()\nimport qcore\n"
_PLUGINS = """
from types import ModuleType
from qcore.discovery.registry import registry
for i in range(10):
    plugin = ModuleType(f"p{i}")
    plugin.qcore_probe = qcore.hookimpl(lambda: qcore.Available("x"))
    plugin.qcore_linear = qcore.hookimpl(lambda request: qcore.Refusal("no"))
    registry.add(plugin.__name__, plugin)
"""
_KEPT, _FIRST = "verdict on disk", "nothing on disk: it verifies the kernel"
_SCHEMES = ("w4a16-g128", "w8a16", "w8a8", "w4a8-g32")


def _explain(scheme: str) -> str:
    timed = f"t = time.perf_counter()\nqcore.explain({scheme!r})\nprint(time.perf_counter() - t)"
    return f"{_START}{_PLUGINS}qcore.plugins()\ngc.collect()\n{timed}"


_TIMES = {
    "`import qcore` after `import torch`": (_START + "print(time.perf_counter() - t)", 80),
    "discovery (`qcore.plugins()`)": (
        _START + "gc.collect()\nt = time.perf_counter()\nqcore.plugins()\nprint(time.perf_counter() - t)",
        100,
    ),
    **{f"`explain('{scheme}')` with ten plugins, {_KEPT}": (_explain(scheme), 50) for scheme in _SCHEMES},
    **{f"`explain('{scheme}')` with ten plugins, {_FIRST}": (_explain(scheme), 50) for scheme in _SCHEMES},
}


def process_rows(count: int) -> list[tuple[str, ...]]:
    """Medians over fresh processes."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (code, limit) in _TIMES.items():
            times = [_fresh(code, folder, forget=_FIRST in name) for _ in range(count + 1)][1:]  # the first compiles
            rows.append((name, f"{statistics.median(times):.1f}", f"{min(times):.1f}", str(limit)))
    return rows


def _fresh(code: str, folder: str, *, forget: bool = False) -> float:
    if forget:
        shutil.rmtree(f"{folder}/cache", ignore_errors=True)
    # Compiled modules as an installation has them, whatever this machine's settings are.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("QCORE_", "PYTHON"))}
    environ |= {"PYTHONPYCACHEPREFIX": f"{folder}/pyc", "QCORE_CACHE_DIR": f"{folder}/cache"}
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ)  # noqa: S603
    return float(run.stdout) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=7, help="fresh processes per figure")
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results/overhead.md too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    calls = markdown((f"call, bf16, M=1, N={N}, K={K}", "us", "over the raw op"), layer_rows())
    processes = markdown(("in a fresh process", "median ms", "best ms", "to reach"), process_rows(arguments.processes))
    text = f"{header('What qcore adds')}\n\n{calls}\n\n{processes}\n"
    print(text)
    if arguments.save:
        (Path(__file__).parent / "results" / "overhead.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
