"""Calls as a user makes them: modules one by one on a Vulkan device, and chained by `qcore_vulkan.sequential`.

    python benchmarks/vulkan_chain.py [--device NAME] [--seconds 1] [--output benchmarks/results/DATE-vulkan-chain.md]

Prints Markdown. Every figure is the median time of a whole call, from CPU tensor to CPU tensor, in turns with the
others; *float32* is the same model in float32 on the CPU.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import torch
from _table import header, markdown
from torch import Tensor, nn

import qcore
import qcore_vulkan
from qcore_vulkan import device as devices

SCHEMES = ("w8a8", "w4a16-g128")


def main() -> None:
    """Measure every model, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="index of a Vulkan device, or part of its name")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line")
    parser.add_argument("--small", action="store_true", help="smaller models, for a software device")
    parser.add_argument("--output", type=Path, help="a file for the table")
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.device:
            stack.enter_context(qcore_vulkan.on_device(options.device))
        found = devices.get().description
        text = _report(found.name, f"{found.driver_name} {found.driver_info}", options.seconds, options.small)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


def _report(name: str, driver: str, seconds: float, small: bool) -> str:
    columns = ("model", "scheme", "x", "layers", "float32", "one by one", "chained", "gain", "per layer", "submissions")
    rows = [_row(what, model, x, scheme, seconds) for what, model, x in _models(small) for scheme in SCHEMES]
    title = header("Chains on a Vulkan device")
    return f"{title}\n- Device: {name}, {driver}\n\n{markdown(columns, rows)}"


def _models(small: bool) -> Iterator[tuple[str, nn.Sequential, Tensor]]:
    """Name, model in float32 and its input."""
    n, wide, blocks = (256, 1024, 2) if small else (1024, 4096, 8)
    for rows in (1, 16):
        yield "linears", nn.Sequential(*(nn.Linear(n, n) for _ in range(32))), torch.randn(rows, n)
        mlp = [module for _ in range(blocks) for module in (nn.Linear(n, wide), nn.GELU(), nn.Linear(wide, n))]
        yield "MLPs", nn.Sequential(*mlp), torch.randn(rows, n)
    sizes = (3, 16, 32, 32) if small else (3, 64, 128, 128)
    convs = [module for a, b in pairwise(sizes) for module in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())]
    yield "convolutions", nn.Sequential(*convs), torch.randn(1, 3, 32, 32)


def _row(what: str, model: nn.Sequential, x: Tensor, scheme: str, seconds: float) -> tuple[str, ...]:
    torch.manual_seed(0)
    quantized = copy.deepcopy(model).eval()
    with qcore.using("vulkan", strict=True), torch.inference_mode():
        qcore.quantize_(quantized, scheme)
        chain = qcore_vulkan.sequential(quantized)
        plain, one_by_one, chained = _medians([lambda: model(x), lambda: quantized(x), lambda: chain(x)], seconds)
    explained = chain.explain()
    layers = sum(step.kind.startswith("Quantized") for step in explained)
    shape = "x".join(map(str, x.shape))
    times = (
        _ms(plain),
        _ms(one_by_one),
        _ms(chained),
        f"{one_by_one / chained:.2f}",
        f"{chained / layers * 1e6:.0f} us",
    )
    return (what, scheme, shape, str(layers), *times, str(explained.submissions))


def _medians(calls: list[Callable[[], Tensor]], seconds: float) -> list[float]:
    """Median seconds of each call; they take turns, so that a slow moment hits all alike."""
    for call in calls:
        call()  # records its programs
    times: list[list[float]] = [[] for _ in calls]
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times[0]) < 5:
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


if __name__ == "__main__":
    main()
