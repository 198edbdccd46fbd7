"""Quantized linears on a CUDA device against bfloat16 ``F.linear``, every cell measured in turns with it in one run.

    python benchmarks/cuda_linear.py --output benchmarks/results/DATE-cuda-DEVICE.md --json FILE [--peers all] [--cold]

Prints Markdown: a table of targets with what was reached, then one table per weight. A cell is the ratio to bfloat16
``F.linear`` (above 1 is faster) in CUDA-graph time, the microseconds, and the share of the floor: the bytes of the
packed weight over the read bandwidth measured in this run, or the arithmetic over the rate of a large bfloat16 product
(twice that for int8), whichever is longer. Copies of the weights rotate, so that the second-level cache never holds
them. Time for quantizing activations is always counted. The JSON file also holds the relative error of each cell
against a float64 product with the dequantized weight.

When the budget is spent the run ends in good order and names what it left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

SIZES = "4096x4096,4096x14336,8192x8192,8192x28672,14336x4096"
ROWS = "1,16,64,2048,4,256,1024"
"""Most wanted first: a budget may end before the last."""


def main() -> None:
    options = _arguments()
    if not torch.cuda.is_available():
        sys.exit(
            "There is no CUDA device here, and nothing else can be measured.\n"
            "Run this on a machine with an NVIDIA or AMD GPU, with torch built for it and qcore-cuda installed."
        )
    torch.set_grad_enabled(False)
    if options.cold_child:
        from _cuda_extras import cold_child

        cold_child(options.cold_child)
    else:
        from _cuda_run import run

        run(options)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SIZES, help="KxN, with commas")
    parser.add_argument("--rows", default=ROWS, help="M, with commas")
    parser.add_argument(
        "--peers", default="torch", help="with commas: torch, humming, ...; all: what is installed; none"
    )
    parser.add_argument("--budget", type=float, default=500.0, help="seconds")
    parser.add_argument("--quick", action="store_true", help="one weight, three row counts")
    parser.add_argument("--cold", action="store_true", help="cold starts of a Llama-8B-like set of layers, too")
    parser.add_argument("--no-extras", dest="extras", action="store_false", help="no host time, memory, convolution")
    parser.add_argument("--output", type=Path, help="the tables, Markdown")
    parser.add_argument("--json", type=Path, help="every figure")
    parser.add_argument("--cold-child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.rows = "4096x4096", "1,16,256"
    return options


if __name__ == "__main__":
    main()
