"""Prints what TPU compilers make of whole decoders: bytes that they keep in memory, and what they multiply.

The models have shapes and no values. Needs no TPU. libtpu is found by JAX where it is installed, or at
TPU_LIBRARY_PATH; the rest of the environment that it wants is set here. `--layers 4` cuts the models.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from qcore_xla import aot

os.environ.update(aot.ENVIRONMENT)
sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))  # the models are those of the tests

from llama_shapes import SHAPES, llama, tokens

from qcore_xla.graphs.ahead import compile_model

MIB = 1 << 20
HEAD = (
    "TPU", "model", "blocks", "scheme", "tokens", "weights MiB", "of bf16 MiB", "caches MiB", "in place",
    "temporary MiB", "weights written", "int8 products", "float products", "kernels", "compiled in s",
)  # fmt: skip


def bf16_bytes(name: str, layers: int) -> int:
    """Of the weights of linear layers and the table, unpacked."""
    shape = SHAPES[name]
    width, inner = shape["width"], shape["inner"]
    keys = width // shape["heads"] * shape["kv_heads"]
    return 2 * (layers * width * (2 * width + 2 * keys + 3 * inner) + 2 * shape["vocabulary"] * width)


def row(chip: str, name: str, scheme: str, layers: int, count: int) -> str:
    start = time.process_time()
    model = compile_model(chip, llama(name, scheme, layers), *tokens(count))
    program, seconds = model.program, time.process_time() - start
    int8 = program.factors.count(("s8", "s8"))
    kernels = sum(step.op == "custom-call" for step in program.steps)
    cells = (
        chip, name, layers, scheme, count, f"{model.weights / MIB:.1f}", f"{bf16_bytes(name, layers) / MIB:.0f}",
        f"{model.states / MIB:.1f}", "all" if model.aliased == model.states else f"{model.aliased / MIB:.1f}",
        f"{program.temporary / MIB:.2f}", len(model.written_weights) if count == 1 else "-", int8,
        len(program.factors) - int8, kernels, f"{seconds:.0f}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Compile, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", default=["v5e", "v6e"])
    parser.add_argument("--models", nargs="+", default=list(SHAPES))
    parser.add_argument("--schemes", nargs="+", default=["w4a16-g64", "w8a16", "w8a8", "w4a8-g64"])
    parser.add_argument("--layers", type=int, help="blocks of each model; by default all")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], help="rows of a call: 1 decodes")
    chosen = parser.parse_args()
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD))
    for name in chosen.models:
        layers = chosen.layers or SHAPES[name]["layers"]
        for scheme in chosen.schemes:
            for count in chosen.tokens:
                for chip in chosen.chips:
                    print(row(chip, name, scheme, layers, count), flush=True)


if __name__ == "__main__":
    main()
