"""Milliseconds to import one quantized layer of another tool, beside those to read its bytes.

Prints a Markdown table; ``--output FILE`` also writes it. One thread; the file is in the page cache, so reading is a
copy of memory: what an import cannot do without is that copy and writing the bytes of the result. Where the system
gives memory out anew, page by page, that alone takes longer than either; compare the least times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _table import header, markdown
from safetensors.torch import save_file
from torch import Tensor

from qcore.checkpoint.archive import Archive
from qcore.checkpoint.opening import open_checkpoint

GROUP = 128
LAYER = "model.fc"


def words(*shape: int) -> Tensor:
    """Random int32."""
    return torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int64).int()


def gptq(n: int, k: int, *, bits: int = 4, act_order: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and settings of a layer with random codes."""
    groups = k // GROUP
    index = torch.arange(k) // GROUP
    tensors = {
        "qweight": words(k * bits // 32, n),
        "qzeros": words(groups, n * bits // 32),
        "scales": torch.rand(groups, n).half(),
        "g_idx": (index[torch.randperm(k)] if act_order else index).int(),
    }
    return tensors, {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order, "sym": False}


def awq(n: int, k: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Likewise, of AWQ's version gemm."""
    groups = k // GROUP
    tensors = {"qweight": words(k, n // 8), "qzeros": words(groups, n // 8), "scales": torch.rand(groups, n).half()}
    return tensors, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


CASES: dict[str, Callable[[int, int], tuple[dict[str, Tensor], dict[str, Any]]]] = {
    "gptq": gptq,
    "gptq, act-order": lambda n, k: gptq(n, k, act_order=True),
    "gptq, 8 bits": lambda n, k: gptq(n, k, bits=8),
    "awq": awq,
}


def best(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Least and median milliseconds."""
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times), statistics.median(times)


def measured(name: str, n: int, k: int, folder: Path, rounds: int) -> tuple[str, ...]:
    """The line of one case."""
    tensors, settings = CASES[name](n, k)
    save_file({f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with Archive.open(folder) as raw, open_checkpoint(folder) as archive:
        reading = best(lambda: [raw.read(entry) for entry in raw.entries], rounds)
        weight = archive.quantized(f"{LAYER}.weight")
        parts = list(weight.tensors().values())
        floor = best(lambda: ([raw.read(entry) for entry in raw.entries], [part.clone() for part in parts]), rounds)
        del weight
        importing = best(lambda: archive.quantized(f"{LAYER}.weight"), rounds)
    size = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
    ratios = (importing[0] / reading[0], importing[0] / floor[0])
    cells = [f"{least:.1f} ({median:.1f})" for least, median in (reading, floor, importing)]
    return name, f"({n}, {k})", f"{size:.0f}", *cells, *(f"{ratio:.1f}" for ratio in ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for name in CASES:
        for n, k in ((14336, 4096), (4096, 14336)):
            with tempfile.TemporaryDirectory(prefix="qcore-importing-") as folder:
                rows.append(measured(name, n, k, Path(folder), options.rounds))
    columns = ("checkpoint", "(N, K)", "MiB", "reading", "reading, writing", "importing", "/ reading", "/ both")
    title = f"{header('Importing one layer of another tool')}\n\nMilliseconds, least (median) of {options.rounds}"
    text = f"{title}\n\n{markdown(columns, rows)}\n"
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
