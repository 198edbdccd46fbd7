"""Quantize a real sentence model and a convolutional network, and print what it costs and gains.

    nox -s demo                        # makes its own environment
    python examples/demo.py --quick    # less time for the latencies
    python examples/demo.py --device cuda
    python examples/demo.py --backend vulkan --quick

Exit code 1 and a list where a figure is below what is expected of it.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path

import digits
import sentences
import torch
from expectations import check_digits, check_sentences, check_served
from rich.console import Console
from tables import digits_table, kernel_table, latency_table, quality_table
from torch import nn

import qcore

WIDTH = 110

Models = dict[tuple[str, str], nn.Module]
"""Models by scheme (empty: not quantized) and by the dtype they compute in."""


def main() -> int:
    """Run everything; 0 where every expectation holds."""
    options, start = _arguments(), time.perf_counter()
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    qcore.configure(backends=options.backend)
    where = _device_name(options.device) + (f", {_backend_name(options.backend)}" if options.backend else "")
    console.print(f"qcore {qcore.__version__}, torch {torch.__version__}, {where}")
    wanted = options.backend or options.device.type
    missed = [*_sentences(console, options.device, options.seconds, wanted), *_digits(console, options.device)]
    console.print(f"\n{time.perf_counter() - start:.0f} seconds in all.")
    for line in missed:
        console.print(f"[bold red]missed:[/] {line}", soft_wrap=True)
    console.print("[bold red]Not every expectation holds.[/]" if missed else "[bold green]Every expectation holds.[/]")
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="time for the latencies of each batch size")
    parser.add_argument("--quick", dest="seconds", action="store_const", const=1.0, help="the same as --seconds 1")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="where the tensors are")
    parser.add_argument("--backend", metavar="PLUGIN", help="the plugin to be asked first, e.g. vulkan")
    return parser.parse_args()


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{torch.get_num_threads()} CPU threads"
    if not torch.accelerator.is_available() or device.type != torch.accelerator.current_accelerator().type:
        raise SystemExit(f"torch sees no device {str(device)!r} here; `qcore doctor` says what is here.")
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _backend_name(name: str) -> str:
    found = next((status for status in qcore.plugins() if status.name == name), None)
    if found is None or found.state != "available":
        raise SystemExit(f"plugin {name!r} is not available: {found.reason if found else 'it is not installed'}")
    return f"{name} on {found.device}"


def _sentences(console: Console, device: torch.device, seconds: float, wanted: str) -> list[str]:
    console.rule("MiniLM-L6: a sentence model of 22.7 million weights, 37 linear layers and 3 embeddings")
    source, lines = sentences.SentenceModel(device), sentences.read_sentences()
    expected = source.embed(source.trained(), lines)
    models: Models = {("", name): source.trained().to(device, dtype) for name, dtype in sentences.DTYPES.items()}
    outcomes = []
    for scheme in sentences.SCHEMES:
        with console.status(f"quantizing to {scheme}, saving, loading into a fresh model"):
            outcomes.append(_one_scheme(source, scheme, models, expected))
    plain = _one_scheme(source, sentences.COMPARED, {}, expected)
    half = sentences.quality(source.embed(models["", "bf16"], lines), expected)
    console.print(quality_table(outcomes, plain, half, len(lines)), kernel_table(models))
    with console.status("measuring latencies"):
        times = {batch: sentences.latencies(source, models, batch, seconds) for batch in sentences.BATCHES}
    console.print(latency_table(times))
    return [*check_sentences(outcomes), *check_served(models, wanted)]


def _one_scheme(
    source: sentences.SentenceModel, scheme: str, models: Models, expected: torch.Tensor
) -> sentences.Outcome:
    """Take one scheme from the float model through a checkpoint; adds to ``models``."""
    with tempfile.TemporaryDirectory(prefix="qcore-demo-") as folder:
        model, size_ratio = sentences.roundtrip(source, scheme, Path(folder))
    models[scheme, "float32"] = model
    models[scheme, "bf16"] = copy.deepcopy(model).to(torch.bfloat16)
    found = sentences.quality(source.embed(model, sentences.read_sentences()), expected)
    return sentences.Outcome(scheme, size_ratio, found, sentences.left_in_float(model))


def _digits(console: Console, device: torch.device) -> list[str]:
    console.rule("Digits: a convolutional network, trained here")
    with console.status("training"):
        results = digits.run(device)
    console.print(digits_table(results))
    return list(check_digits(results))


if __name__ == "__main__":
    sys.exit(main())
