"""Results of qcore-cpu in a process of its own: an instruction set and a number of threads are chosen when one starts.

``python cpu_children.py FILE``: writes the results of `problems` to FILE, by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

SCHEMES = (
    "w8a8",
    "w8a8-aasym",
    "w8a8-g64-asym",
    "w4a8-g32",
    "w4a8-g32-asym-aasym",
    "w4a8-g128",
    "w8a8-static",
    "w4a16-g32-fzp",
)
SHAPES = ((1, 77, 20), (3, 300, 33), (13, 576, 64), (26, 1040, 96))


def results() -> dict[str, torch.Tensor]:
    """Results of int8 activations (and of float zero points), for tails of every kind."""
    import qcore
    from qcore.nn import QuantizedConv2d, QuantizedLinear

    made = {}
    for scheme in SCHEMES:
        text = "w8a8-static(0.05,3)" if scheme == "w8a8-static" else scheme
        parsed = qcore.Scheme.parse(text)
        for m, k, n in SHAPES:
            generator = torch.Generator().manual_seed(m * k + n)
            dense = torch.randn(n, k, generator=generator) * 0.05 + 0.03
            x = torch.randn(m, k, generator=generator) + 0.3
            fast = "absmax" if parsed.weight.zero is qcore.ZeroPoint.NONE else "minmax"
            weight = qcore.quantize(dense, parsed.weight, fast)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                layer = QuantizedLinear.from_qtensor(weight, scheme=text, dtype=dtype)
                assert layer.decision.kernel.name == "cpu.linear"
                made[f"{scheme} {m}x{k}x{n} {dtype}"] = layer(x.to(dtype))
    for text in ("w8a8", "w8a8-static(0.05,3)", "w4a8", "w8a8-aasym"):
        generator = torch.Generator().manual_seed(5)
        conv = torch.nn.Conv2d(24, 40, 3, padding=1, stride=2)
        with torch.no_grad():
            conv.weight.copy_(torch.randn(conv.weight.shape, generator=generator) * 0.1)
            assert conv.bias is not None
            conv.bias.copy_(torch.randn(40, generator=generator))
        quantized = QuantizedConv2d.from_float(conv, text)
        made[f"conv2d {text}"] = quantized(torch.randn(2, 24, 15, 29, generator=generator))
    return made


def run(path: Path, isa: str = "", threads: int = 1) -> dict[str, torch.Tensor]:
    """The results of a child with this instruction set (empty: the best) and number of threads."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if isa:
        env["QCORE_CPU_ISA"] = isa
    command = [sys.executable, __file__, str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(path)


if __name__ == "__main__":
    with torch.no_grad():
        torch.save(results(), sys.argv[1])
