"""Quantize a real sentence model and a convolutional network, and print what it costs and gains.

    nox -s demo                        # makes its own environment
    python examples/demo.py --quick    # less time for the latencies
    python examples/demo.py --device cuda
    python examples/demo.py --backend vulkan --quick
    python examples/demo.py --backend xla    # each sentence model as a whole program, compiled for a few sizes

Exit code 1 and a list where a figure is below what is expected of it.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path

from steps import CONSOLE, step

with step("importing torch, transformers and scikit-learn"):
    import busy
    import digits
    import sentences
    import torch
    from expectations import check_digits, check_programs, check_sentences, check_served
    from programs import WholeProgram
    from tables import digits_table, kernel_table, latency_table, program_table, quality_table
    from torch import nn

    import qcore

Models = dict[tuple[str, str], nn.Module]
"""Models by scheme (empty: not quantized) and by the dtype they compute in."""


def main() -> int:
    """Run everything; 0 where every expectation holds."""
    options, start = _arguments(), time.perf_counter()
    qcore.configure(backends=options.backend)
    where = _device_name(options.device) + (f", {_backend_name(options.backend)}" if options.backend else "")
    CONSOLE.print(f"qcore {qcore.__version__}, torch {torch.__version__}, {where}")
    missed = [*_sentences(options.device, options.seconds, options.backend), *_digits(options.device)]
    CONSOLE.print(f"\n{time.perf_counter() - start:.0f} seconds in all.")
    for line in missed:
        CONSOLE.print(f"[bold red]missed:[/] {line}", soft_wrap=True)
    CONSOLE.print("[bold red]Not every expectation holds.[/]" if missed else "[bold green]Every expectation holds.[/]")
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


def _sentences(device: torch.device, seconds: float, backend: str | None) -> list[str]:
    CONSOLE.rule("MiniLM-L6: a sentence model of 22.7 million weights, 37 linear layers and 3 embeddings")
    with step("embedding sentences in float32"):
        source, lines = sentences.SentenceModel(device, whole=backend == "xla"), sentences.read_sentences()
        expected = source.embed(source.trained(), lines)
        models: Models = {("", name): source.ready(source.trained().to(d)) for name, d in sentences.DTYPES.items()}
    outcomes = []
    for scheme in sentences.SCHEMES:
        with step(f"quantizing to {scheme}, saving, loading into a fresh model"):
            outcomes.append(_one_scheme(source, scheme, models, expected))
    with step(f"the same with {sentences.COMPARED} and in bf16"):
        plain = _one_scheme(source, sentences.COMPARED, {}, expected)
        half = sentences.quality(source.embed(models["", "bf16"], lines), expected)
    CONSOLE.print(quality_table(outcomes, plain, half, len(lines)))
    if not source.whole:
        CONSOLE.print(kernel_table(models))
    times, taken = {}, []
    for batch in sentences.BATCHES:
        with step(f"measuring latencies of batches of {batch}"):
            taken.append(busy.share_taken())
            times[batch] = sentences.latencies(source, models, batch, seconds)
            taken.append(busy.share_taken())
    CONSOLE.print(latency_table(times))
    if busy.warning(max(taken)):
        CONSOLE.print(f"[bold yellow]{busy.warning(max(taken))}[/]", soft_wrap=True)
    if not source.whole:
        return [*check_sentences(outcomes), *check_served(models, backend or device.type)]
    programs = {name: model for name, model in models.items() if isinstance(model, WholeProgram)}
    CONSOLE.print(program_table(programs))
    return [*check_sentences(outcomes), *check_programs(programs)]


def _one_scheme(
    source: sentences.SentenceModel, scheme: str, models: Models, expected: torch.Tensor
) -> sentences.Outcome:
    """Take one scheme from the float model through a checkpoint; adds to ``models``."""
    with tempfile.TemporaryDirectory(prefix="qcore-demo-") as folder:
        model, size_ratio = sentences.roundtrip(source, scheme, Path(folder))
    models[scheme, "float32"] = source.ready(model)
    models[scheme, "bf16"] = source.ready(copy.deepcopy(model).to(torch.bfloat16))
    found = sentences.quality(source.embed(models[scheme, "float32"], sentences.read_sentences()), expected)
    return sentences.Outcome(scheme, size_ratio, found, sentences.left_in_float(model))


def _digits(device: torch.device) -> list[str]:
    CONSOLE.rule("Digits: a convolutional network, trained here")
    with step("training"):
        results = digits.run(device)
    CONSOLE.print(digits_table(results))
    return list(check_digits(results))


if __name__ == "__main__":
    sys.exit(main())
