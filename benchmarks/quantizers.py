"""Time of each weight quantizer on one large weight, beside the time to read and write it once.

Prints a Markdown table; ``--output FILE`` also writes it. The floor is the memory traffic: the float weight is read
once and the codes are written once, at the bandwidth that a copy of the weight reaches in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from _table import header, markdown

import qcore
from qcore.resolving.tuning import interleaved_medians

INTEGERS = ("int4-g128", "int4-g128-asym", "int4-g128-fzp", "int8", "int8-asym")
TABLES = ("fp8", "fp4-g32-e8m0", "fp4-g16-e4m3", "nf4-g64")
QUANTIZERS = ("absmax", "absmax_full", "minmax", "mse", "als")


def cells(weight: torch.Tensor) -> dict[tuple[str, str], Callable[[], object]]:
    """Every quantizer with every format that it makes."""
    found: dict[tuple[str, str], Callable[[], object]] = {}
    for text in (*INTEGERS, *TABLES):
        symmetric = qcore.Format.parse(text).zero is qcore.ZeroPoint.NONE
        for name in QUANTIZERS if text in INTEGERS else ("absmax", "mse"):
            if name in ("mse", "als") or symmetric == name.startswith("absmax"):
                found[text, name] = lambda text=text, name=name: qcore.quantize(weight, text, name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="4096x11008")
    parser.add_argument("--dtype", default="float32", help="of the weight, e.g. bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    n, k = map(int, options.shape.split("x"))
    device = torch.device(options.device)
    weight = torch.randn(n, k, device=device).to(getattr(torch, options.dtype))
    quantizers = cells(weight)
    calls = [weight.clone, *quantizers.values()]
    copy, *times = interleaved_medians(calls, device, seconds=2.0)
    rows = []
    for (text, name), ms in zip(quantizers, times, strict=True):
        made = qcore.quantize(weight, text, name)
        floor = copy * (weight.nbytes + made.nbytes) / (2 * weight.nbytes)
        error = float((made.dequantize() - weight.float()).norm() / weight.float().norm())
        rows.append((text, name, f"{ms:.3g}", f"{floor:.3g}", f"{ms / floor:.1f}", f"{error:.4f}"))
    columns = ("format", "quantizer", "ms", "floor ms", "times the floor", "relative error")
    text = f"{header(f'Quantizing a {options.dtype} weight of {n}x{k}')}\n\n{markdown(columns, rows)}\n"
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
