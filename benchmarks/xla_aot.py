"""Prints what TPU compilers make of the linear layers of qcore-xla: fusions, and bytes accessed and written at most.

Needs no TPU. libtpu is found by JAX where it is installed, or at TPU_LIBRARY_PATH; the rest of the environment that it
wants is set here. `--rows 1,16,128 --shape 4096x4096`
"""

from __future__ import annotations

import argparse
import os

from qcore_xla import aot

os.environ.update(aot.ENVIRONMENT)

from qcore_xla.aot_forms import CHIPS, compiled_linear, weight_bytes

SCHEMES = ("w8a16", "w8a16-g128", "w4a16", "w4a16-g128", "w8a8", "w8a8-g128", "w4a8", "w4a8-g128")
MIB = 1 << 20


def row(chip: str, scheme: str, m: int, n: int, k: int, *, pallas: bool) -> str:
    program = compiled_linear(chip, scheme, m, n, k, pallas=pallas)
    weight = weight_bytes(scheme, n, k)
    # The compiler knows nothing of what a kernel of ours reads; its arguments and its result are that.
    accessed = "-" if pallas else f"{program.bytes_accessed / MIB:.1f}"
    whole = "yes" if program.largest() >= weight // 2 else "no"
    refused = "refused" if "a8" in scheme and aot.why_not_int8(chip) else "served"
    cells = (chip, scheme, "Pallas" if pallas else "XLA", refused, str(m), f"{weight / MIB:.1f}", accessed)
    steps = (str(program.fusions), str(len(program.steps)), f"{program.largest() / MIB:.2f}", whole)
    return "| " + " | ".join((*cells, *steps, ", ".join(program.products) or "in the kernel")) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="16,128", help="numbers of rows of x")
    parser.add_argument("--shape", default="4096x4096", help="N x K of the weight")
    options = parser.parse_args()
    n, k = map(int, options.shape.split("x"))
    head = ("TPU", "scheme", "product by", "qcore", "M", "weight MiB", "accessed MiB", "fusions", "steps")
    print(f"N = {n}, K = {k}, bfloat16 activations\n")
    print("| " + " | ".join((*head, "largest written MiB", "weight written", "dot")) + " |")
    print("|" + "---|" * (len(head) + 3))
    for chip in CHIPS:
        for scheme in SCHEMES:
            for m in map(int, options.rows.split(",")):
                for pallas in (False, True) if scheme.startswith("w4a8") else (False,):
                    print(row(chip, scheme, m, n, k, pallas=pallas), flush=True)


if __name__ == "__main__":
    main()
