"""One activity of the soak, again and again in a process of its own: prints its resident memory as JSON.

``python activities.py NAME SECONDS``. The first part of the time is for caches to fill: their bounds are reached with
numbers that a user would take hours to draw.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import itertools
import json
import pickle
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import qcore
from qcore.resolving import resolver

_SAMPLES = 60
Step = Callable[[], object]


def new_row_counts() -> Step:
    """Layers on oneDNN's int8 product, which keeps a primitive for each shape that it has seen."""
    schemes = ("w8a8", "w8a16", "w4a8-g32", "w8a8-static")
    dense = torch.nn.Linear(128, 96)
    layers = [torch.nn.Sequential(copy.deepcopy(dense)) for _ in schemes]
    for layer, scheme in zip(layers, schemes, strict=True):
        batches = [torch.randn(4, 128)] if "static" in scheme else None
        qcore.quantize_(layer, scheme, calibration=batches)
    return lambda: [layer(torch.randn(int(2 ** random.uniform(0, 12.5)), 128)) for layer in layers]


def new_images() -> Step:
    """Convolutions of ever new image sizes."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1))
    qcore.quantize_(model, "w8a8-static", calibration=[torch.randn(1, 3, 8, 8)])
    return lambda: model(torch.randn(random.randint(1, 3), 3, random.randint(3, 200), random.randint(3, 200)))


def new_sizes_explained() -> Step:
    """Decisions on sizes that nobody has asked for before."""
    sizes = itertools.count(1)
    return lambda: qcore.explain("w4a16-g128", n=next(sizes), k=128 * random.randint(1, 400))


def new_weights() -> Step:
    """The functional form with weights that come and go."""
    x = torch.randn(3, 64)

    def step() -> None:
        weight = qcore.quantize(torch.randn(48, 64), random.choice(("int8", "int4-g32", "int4-g32-asym")))
        qcore.linear(x, weight)
        qcore.embedding(torch.tensor([1, 5]), weight)

    return step


def models() -> Step:
    """Models that are quantized, saved, loaded, copied, pickled, cast and dropped."""
    folder = Path(tempfile.mkdtemp())

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 50))

    def step() -> None:
        model = build()
        qcore.quantize_(model, random.choice(("w8a16", "w4a16-g32", "w4a16-g32-asym")))
        qcore.save(model, folder / "one.safetensors")
        qcore.save(model, folder / "many", max_shard_size=4000)
        fresh = build()
        qcore.load_(fresh, random.choice((folder / "one.safetensors", folder / "many")))
        fresh = pickle.loads(pickle.dumps(copy.deepcopy(fresh)))
        fresh.to(torch.bfloat16)(torch.tensor([[1, 2]]))
        str(qcore.report(fresh))

    return step


def gradients() -> Step:
    """Training of what stands around quantized layers."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    qcore.quantize_(model, {"0": "w8a8"})

    def step() -> None:
        model(torch.randn(random.randint(1, 40), 64, requires_grad=True)).sum().backward()
        model.zero_grad()

    return step


def refusals() -> Step:
    """Input that is refused: neither the errors nor what was tried before may stay."""
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
    qcore.quantize_(layer, "w8a8")
    state = {"a.scale": torch.zeros(1), "a.data": torch.zeros(1)}

    def step() -> None:
        for call in (
            lambda: layer(torch.randn(2, random.randint(65, 10_000))),
            lambda: qcore.Format.parse(f"int4-g{random.random()}"),
            lambda: qcore.save(state, "nowhere.safetensors"),
            lambda: qcore.load_(layer, io.BytesIO().getvalue().decode() or f"missing-{random.random()}"),
        ):
            try:
                call()
            except (qcore.QcoreError, OSError):
                continue
            raise AssertionError("what must be refused was accepted")

    return step


def broken_plugins() -> Step:
    """Plugins that come, fail in different words each time, and go."""
    from types import ModuleType

    from qcore.discovery.registry import registry

    def step() -> None:
        plugin, words = ModuleType("mine"), str(random.random())

        def offer(request: object) -> object:
            raise RuntimeError(words)

        vars(plugin)["qcore_linear"] = qcore.hookimpl(offer)
        offer.__name__ = "qcore_linear"
        registry.add("mine", plugin, "qcore-mine", words)
        qcore.explain("w8a16", n=16, k=16)
        registry.remove("mine")

    return step


def settings() -> Step:
    """Settings that change from call to call."""
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
    qcore.quantize_(layer, "w8a8")
    weight = qcore.quantize(torch.randn(8, 16), "int8")

    def step() -> None:
        with qcore.using(disable=f"plugin-{random.randint(0, 10**9)}"):
            qcore.linear(torch.randn(2, 16), weight)

    return step


def decisions_dropped() -> Step:
    """Every kernel chosen anew."""

    def step() -> None:
        resolver.forget()
        qcore.explain(random.choice(("w8a8", "w4a16-g32", "w8a16-g32-asym")), n=64, k=128, dtype=torch.float32)

    return step


ACTIVITIES = (
    new_row_counts, new_images, new_sizes_explained, new_weights, models, gradients, refusals, broken_plugins, settings,
    decisions_dropped,
)  # fmt: skip


def resident() -> int:
    """Bytes in memory, after everything that can be given back is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def samples(step: Step, seconds: float) -> Iterator[int]:
    """Resident memory at even distances in time, while ``step`` is repeated."""
    for _ in range(_SAMPLES):
        until = time.monotonic() + seconds / _SAMPLES
        while True:
            step()
            if time.monotonic() > until:
                break
        yield resident()


def main() -> None:
    """Run one activity."""
    name, seconds = sys.argv[1], float(sys.argv[2])
    warnings.simplefilter("ignore")
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    step = next(make for make in ACTIVITIES if make.__name__ == name)()
    print(json.dumps(list(samples(step, seconds))))


if __name__ == "__main__":
    main()
