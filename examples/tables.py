"""The tables that the demo prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from programs import WholeProgram
from rich.table import Table
from sentences import DTYPES, TOP, Outcome, Quality, served_by
from torch import nn

from qcore import graphs

if TYPE_CHECKING:
    from digits import Accuracy
    from language import Written


def quality_table(outcomes: Iterable[Outcome], plain: Outcome, half: Quality, count: int) -> Table:
    """Size and closeness to float32 of every scheme.

    ``plain``: the last one without calibration; ``half``: the model in bf16, not quantized.
    """
    table = Table(
        title=f"{count} sentences, embedded by a fresh model that loaded the checkpoint",
        caption="size: checkpoint / float32 file; cosine, top-1, top-5: agreement with the float32 model;\n"
        "pairs: sentences whose nearest neighbour is their paraphrase;\n"
        "@gptq: calibrated on 40 other sentences; below it the same without, for comparison",
    )
    table.add_column("scheme", min_width=22)
    for name in ("size", "cosine min", "cosine mean", "top-1", f"top-{TOP}", "pairs"):
        table.add_column(name, justify="right", min_width=8)
    table.add_row("bf16, not quantized", "0.500", *_quality_cells(half), style="dim")
    for outcome in (*outcomes, plain):
        style = "dim" if outcome is plain else ""
        table.add_row(outcome.scheme, f"{outcome.size_ratio:.3f}", *_quality_cells(outcome.quality), style=style)
    return table


def _quality_cells(found: Quality) -> list[str]:
    cosines = [f"{value:.4f}" for value in (found.cosine_min, found.cosine_mean)]
    return [*cosines, *(f"{share:.0%}" for share in (found.top1, found.top5, found.pairs))]


def kernel_table(models: Mapping[tuple[str, str], nn.Module]) -> Table:
    """Which plugin and kernel serve how many layers of the models, keyed by scheme and dtype."""
    table = Table(title="who served, from qcore.report(model)")
    for name in ("scheme", "computes in", "plugin: layers x kernel"):
        table.add_column(name)
    for (scheme, dtype), model in models.items():
        if scheme:
            table.add_row(scheme, dtype, served_by(model))
    return table


def program_table(models: Mapping[tuple[str, str], WholeProgram]) -> Table:
    """How many programs XLA runs the models in, keyed by scheme and dtype, and what it compiled for them."""
    table = Table(
        title="whole programs, from qcore.graphs.explain(model)",
        caption="programs: one for each size that batches are padded to; compilations: of XLA, all in all",
    )
    for name in ("scheme", "computes in"):
        table.add_column(name)
    for name in ("programs", "nodes in torch", "compilations"):
        table.add_column(name, justify="right")
    for (scheme, dtype), model in models.items():
        found = graphs.explain(model)
        cells = (str(count) for count in (found.submissions, len(found.host), model.compilations))
        table.add_row(scheme or "not quantized", dtype, *cells, style="" if scheme else "dim")
    return table


def latency_table(times: Mapping[int, Mapping[tuple[str, str], float]]) -> Table:
    """Milliseconds by batch size, then by scheme and dtype, beside the ratios to the models that are not quantized."""
    table = Table(
        title="latency of a forward pass: medians of all models measured in turns",
        caption="/ float32, / bf16: ratio to that model, not quantized; below 1 is faster",
    )
    for name in ("scheme", "computes in"):
        table.add_column(name)
    for batch in times:
        for head in (f"batch {batch}", *(f"/ {dtype}" for dtype in DTYPES)):
            table.add_column(head, justify="right")
    for scheme, dtype in next(iter(times.values())):
        cells = [cell for own in times.values() for cell in _latency_cells(own, (scheme, dtype))]
        table.add_row(scheme or "not quantized", dtype, *cells, style="" if scheme else "dim")
    return table


def _latency_cells(times: Mapping[tuple[str, str], float], key: tuple[str, str]) -> list[str]:
    return [f"{times[key]:.1f} ms", *(f"{times[key] / times['', dtype]:.2f}" for dtype in DTYPES)]


def digits_table(results: Iterable[Accuracy]) -> Table:
    """Accuracy of the convolutional network before and after."""
    table = Table(title="accuracy on 450 test images")
    for name in ("scheme", "before", "after", "layers x kernel"):
        table.add_column(name)
    for result in results:
        served = ", ".join(f"{count} x {kernel}" for kernel, count in result.kernels.items())
        table.add_row(result.scheme, f"{result.before:.2%}", f"{result.after:.2%}", served)
    return table


def language_table(found: Sequence[Written], speeds: Mapping[str, float], counted: int, new: int) -> Table:
    """Size, perplexity and speed of the language model; the first of ``found`` is not quantized.

    ``speeds``: tokens per second by scheme; ``counted``: tokens of the passage; ``new``: tokens of an answer.
    """
    table = Table(
        title="written by a fresh model in bfloat16 that loaded the checkpoint",
        caption="the table of tokens, also the head, is in w8a16; 4 bits lose less with @gptq and your own text\n"
        f"perplexity: of {counted} tokens of English text, lower is better\n"
        f"tokens per second: medians of answers of {new} tokens, prompt included, the models in turns",
    )
    table.add_column("scheme")
    for name in ("file", "/ bfloat16", "perplexity", "/ bfloat16", "tokens per second", "/ bfloat16"):
        table.add_column(name, justify="right")
    plain = found[0]
    for one in found:
        own = (one.file_bytes / 2**20, one.perplexity, speeds[one.scheme])
        ratios = (one.file_bytes / plain.file_bytes, one.perplexity / plain.perplexity, own[2] / speeds[""])
        cells = [f"{own[0]:.0f} MiB", f"{ratios[0]:.3f}", f"{own[1]:.2f}", f"{ratios[1]:.3f}"]
        cells += [f"{own[2]:.1f}", f"{ratios[2]:.2f}"]
        table.add_row(one.scheme or "not quantized", *cells, style="" if one.scheme else "dim")
    return table
