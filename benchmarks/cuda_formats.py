"""What the formats of DESIGN section 11 cost on a CUDA device: a model quantized, table formats, orders.

Prints Markdown tables; ``--output FILE`` also writes them, ``--only PART`` makes one of ``model``, ``formats``,
``tables`` and ``order``. Times of calls are medians of CUDA graph replays. `cuda_experts.py` times experts,
`quantizers.py --device cuda` single weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import _cuda_table_cells
import torch
from _cuda_timing import Replay, in_turns
from _table import header, markdown
from torch import nn

import qcore

LAYERS = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
"""K and N of the linear layers of one block of Llama-3-8B, q, k, v and gate, up joined."""
BLOCKS = 32
MODEL_SCHEMES = ("w4a16-g128@absmax", "w4a16-g128", "w4a16-g32-asym", "w4a16-g128@als", "mxfp4")
TABLE_SCHEMES = ("mxfp4", "nvfp4", "nf4", "wfp8a16", "wfp8afp8")
BF16 = torch.bfloat16
Part = Iterator[str]


def blocks(count: int) -> nn.Sequential:
    """Linear layers of ``count`` blocks, bfloat16, on the device."""
    layers = [nn.Linear(k, n, bias=False, device="cuda", dtype=BF16) for _ in range(count) for k, n in LAYERS]
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.02)
    return nn.Sequential(*layers)


def seconds(call: Callable[[], object]) -> float:
    """Seconds of one call, the device's work included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def model() -> Part:
    """A whole model: layers are quantized, bound and packed for their kernels."""
    rows = []
    for scheme in MODEL_SCHEMES:
        first = seconds(lambda scheme=scheme: qcore.quantize_(blocks(1), scheme))  # type: ignore[misc]
        whole = blocks(BLOCKS)
        count = sum(p.numel() for p in whole.parameters())
        taken = seconds(lambda scheme=scheme, whole=whole: qcore.quantize_(whole, scheme))  # type: ignore[misc]
        rows.append((scheme, f"{first:.1f}", f"{taken:.2f}", f"{taken * 8e9 / count:.2f}"))
        del whole
        torch.cuda.empty_cache()
    yield f"## `quantize_` of {BLOCKS} blocks ({count / 1e9:.2f} billion weights, bf16)"
    yield "The first block also compiles and verifies the kernels, which a machine does once."
    yield markdown(("scheme", "first block, s", "model, s", "for 8 billion, s"), rows)


def formats() -> Part:
    """Table formats beside bf16's own product."""
    rows = []
    plain = nn.Linear(4096, 4096, bias=False, device="cuda", dtype=BF16)
    for scheme in TABLE_SCHEMES:
        layer = qcore.nn.QuantizedLinear.from_float(plain, scheme)
        for m in (1, 64, 2048):
            x = torch.randn(m, 4096, device="cuda", dtype=BF16)
            mine, torchs = in_turns([Replay([lambda c=c, x=x: c(x)]) for c in (layer, plain)])  # type: ignore[misc]
            decision = layer.decision.selected
            rows.append((scheme, str(m), decision.kernel, f"{mine:.0f}", f"{torchs:.1f}", f"{torchs / mine:.2f}"))
    yield "## Linear 4096 x 4096, bf16, microseconds of CUDA graph replays"
    yield markdown(("scheme", "M", "kernel", "qcore", "bf16", "ratio"), rows)


def tables() -> Part:
    """Tables and e4m3 activations, over copies of a weight that exceed the L2 cache."""
    yield "## Tables and e4m3 activations, bf16, microseconds of CUDA graph replays over rotating weights"
    heads = ("K x N", "scheme", "M", "kernel", "qcore", "bf16", "ratio")
    yield markdown(heads, [*_cuda_table_cells.fp8_cells(), *_cuda_table_cells.cells()])


def order() -> Part:
    """The gather that an order costs."""
    weight = qcore.quantize(torch.randn(4096, 4096, device="cuda", dtype=BF16), "int4-g128-asym", "minmax")
    ordered = weight.derived(order=torch.randperm(4096, device="cuda").int())
    layers = [qcore.nn.QuantizedLinear.from_qtensor(w, dtype=BF16) for w in (weight, ordered)]
    rows = []
    for m in (1, 64, 2048):
        x = torch.randn(m, 4096, device="cuda", dtype=BF16)
        graphs = in_turns([Replay([lambda x=x, layer=layer: layer(x)]) for layer in layers])  # type: ignore[misc]
        rows.append((str(m), *(f"{us:.1f}" for us in graphs)))
    yield "## An order: `w4a16-g128-asym`, 4096 x 4096, bf16, microseconds of CUDA graph replays"
    yield markdown(("M", "without", "with an order"), rows)


PARTS = {part.__name__: part for part in (model, formats, tables, order)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    chosen = [PARTS[options.only]] if options.only else PARTS.values()
    with torch.no_grad():
        text = "\n\n".join([header("Formats on a CUDA device"), *(line for part in chosen for line in part())]) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
