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
    from qcore.nn import QuantizedLinear

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
    return {**made, **convolutions(), **unusual(), **embeddings()}


def convolutions() -> dict[str, torch.Tensor]:
    """Results of convolutions of many channels, of groups of few, and of one in each group."""
    from qcore.nn import QuantizedConv2d

    made = {}
    schemes = ("w8a8", "w8a8-static(0.05,3)", "w4a8", "w8a8-aasym", "w4a8-g16-asym", "w8a8-g32-asym-aasym")
    for text in (*schemes, "w4a8-g32-static(0.1,9)"):
        for groups, outputs in ((1, 40), (8, 40), (24, 24), (24, 48), (1, 3), (6, 24), (3, 24)):
            generator = torch.Generator().manual_seed(5)
            conv = torch.nn.Conv2d(24, outputs, 3, padding=1, stride=2, groups=groups)
            with torch.no_grad():
                conv.weight.copy_(torch.randn(conv.weight.shape, generator=generator) * 0.1)
                assert conv.bias is not None
                conv.bias.copy_(torch.randn(outputs, generator=generator))
            quantized = QuantizedConv2d.from_float(conv, text)
            assert quantized.decision.kernel.name == "cpu.conv2d"
            x = torch.randn(2, 24, 15, 29, generator=generator)
            made[f"conv2d {text} {groups} {outputs}"] = quantized(x)
            quantized = QuantizedConv2d.from_float(conv.bfloat16(), text)
            made[f"conv2d {text} {groups} {outputs} bfloat16"] = quantized(x.bfloat16())
            last = x.bfloat16().contiguous(memory_format=torch.channels_last)
            made[f"conv2d {text} {groups} {outputs} bfloat16, last"] = quantized(last)
    return made


def unusual() -> dict[str, torch.Tensor]:
    """Results that are subnormal, Inf and NaN in bfloat16, which processors round in ways of their own."""
    import qcore
    from qcore.nn import QuantizedLinear

    generator = torch.Generator().manual_seed(11)
    made = {}
    for scheme in ("w8a8", "w4a8-g32"):
        for factor in (1e-38, 3e-39, 1e36, 1.0):
            dense = torch.randn(96, 64, generator=generator) * factor
            weight = qcore.quantize(dense, qcore.Scheme.parse(scheme).weight, "absmax")
            layer = QuantizedLinear.from_qtensor(weight, scheme=scheme, dtype=torch.bfloat16)
            x = torch.randn(14, 64, generator=generator)
            if factor == 1.0:
                x[3, 5], x[7, 9] = float("nan"), float("inf")
            result = layer(x.bfloat16())
            made[f"{scheme} {factor}"] = result.view(torch.int16)  # NaN, too, is compared by its bits
    return made


def embeddings() -> dict[str, torch.Tensor]:
    """Rows of tables with usual scales, with those of subnormal results, and with NaN."""
    from torch import nn

    from qcore.nn import QuantizedEmbedding

    generator = torch.Generator().manual_seed(13)
    made = {}
    for scheme in (
        "w8a16",
        "w8a16-g64",
        "w4a16-g32@absmax",
        "w4a16-g32-asym@minmax",
        "w4a16-g64@absmax",
        "w4a16-g48@absmax",
    ):
        for factor in (1.0, 2e-38, 4e-39):
            table = torch.randn(9, 192, generator=generator) * factor
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                layer = QuantizedEmbedding.from_float(nn.Embedding.from_pretrained(table.to(dtype)), scheme)
                assert layer.decision.kernel.name == "cpu.embedding"
                made[f"embedding {scheme} {factor} {dtype}"] = layer(torch.arange(8, -1, -1))
    return {**made, **embeddings_of_nan(generator)}


def embeddings_of_nan(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Bits of rows with scales that are NaN, in vectors of groups and behind them."""
    import qcore
    from qcore_cpu import native

    assert not native.fault()
    from qcore_cpu.embedding import CpuEmbedding

    made = {}
    nans = torch.tensor((-1, 0x7FBFFFFF, -0x7EDCBB, 0x7FC00000), dtype=torch.int32).view(torch.float32)
    for text in ("int4-g32", "int8-g32"):
        weight = qcore.quantize(torch.randn(9, 448, generator=generator), qcore.Format.parse(text), "absmax")
        for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float16, torch.int16)):
            kernel = CpuEmbedding(qcore.EmbeddingRequest(torch.device("cpu"), dtype, 9, 448, weight.format))
            packed = kernel.pack(weight)
            packed["scale"][:4] = nans.unsqueeze(1)  # which no weight may have
            made[f"NaN {text} {dtype}"] = kernel(torch.arange(9), packed).view(bits)
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
