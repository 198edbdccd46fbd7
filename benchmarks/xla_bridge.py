"""What a call of one layer costs on XLA:CPU beside its product, and where the time goes.

The product is 64 x 128, which takes next to nothing. Medians of 200 calls each, the best of nine, in one thread; once
with JAX's default, which hands each product to a thread of its own, once with ``jax_cpu_enable_async_dispatch`` off.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

import numpy as np
import torch
from xla_linear import fastest, kernel_of

import qcore

SCHEMES = ("w8a16", "w4a16-g32", "w8a8")


def measured(scheme: str, dtype: torch.dtype) -> list[float]:
    """Microseconds of: a layer's call, the kernel, the arguments that XLA takes, the engine, and JAX alone."""
    from qcore_xla import calls
    from qcore_xla.engines.jax import ENGINE, _array, jitted

    model = torch.nn.Linear(128, 64, dtype=dtype)
    with qcore.using("xla"):
        layer: Any = qcore.nn.QuantizedLinear.from_float(model, scheme)
    kernel, x = kernel_of(scheme, 64, 128, "cpu", dtype), torch.randn(1, 128, dtype=dtype)
    packed = kernel.pack(layer.weight)
    weight = calls.Weight.of(packed)
    call, given = kernel._call, calls.Given()  # noqa: SLF001
    asked = calls.prepared(x, weight, None, given, call)
    arrays = [t if t is None or i in asked[3] else _array(t) for i, t in enumerate(asked[2])]
    alone = jitted(asked[0], asked[1])
    with torch.inference_mode():
        return [
            fastest(lambda: layer(x)),
            fastest(lambda: kernel(x, packed, None)),
            fastest(lambda: calls.prepared(x, weight, None, given, call)),
            fastest(lambda: ENGINE.run(*asked)),
            fastest(lambda: np.asarray(alone(*arrays))),
        ]


def table(asynchronous: bool) -> None:
    """Print rows for one mode of JAX, in this process."""
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", asynchronous)
    torch.set_num_threads(1)
    for scheme in SCHEMES:
        for dtype in (torch.float32, torch.bfloat16):
            numbers = " | ".join(f"{one:.0f}" for one in measured(scheme, dtype))
            print(f"| {scheme} | {str(dtype).removeprefix('torch.')} | {'on' if asynchronous else 'off'} | {numbers} |")


def main() -> None:
    """Print the table, each mode in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dispatch", choices=["on", "off"], help="one mode only, without a head")
    chosen = parser.parse_args()
    if chosen.dispatch:
        table(chosen.dispatch == "on")
        return
    print("| scheme | x | asynchronous dispatch | layer, us | kernel | its arguments | engine | JAX alone |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for mode in ("on", "off"):
        subprocess.run([sys.executable, __file__, "--dispatch", mode], check=True)  # noqa: S603 - itself


if __name__ == "__main__":
    main()
