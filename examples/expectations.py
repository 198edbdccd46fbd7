"""What the demo promises. A figure that falls short is named, and the demo ends with exit code 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

import qcore
from qcore import graphs

if TYPE_CHECKING:
    from digits import Accuracy
    from language import Written
    from programs import WholeProgram
    from sentences import Outcome

# Mean cosine to the float32 embedding. At 8 bits every single sentence is held to it as well; at 4 bits one short
# sentence may lie further off than the sixty together.
COSINE = {"w8a16": 0.999, "w8a8": 0.99, "w4a16-g32-asym": 0.97, "w4a8-g32@gptq": 0.97}
WHY = "benchmarks/results/2026-11-20-accuracy-minilm.md says which layers cost what"
EACH_SENTENCE = ("w8a16", "w8a8")
PERPLEXITY = {"w8a16": 1.02, "w4a16-g32-asym": 1.4}
"""Of the language model, at most, as a ratio to that of the float model."""
FILE_SIZE = {"w8a16": 0.55, "w4a16-g32-asym": 0.42}
"""Likewise for its file. In so small a model the table of tokens is a fifth of the weights."""
COMPILATIONS = 10
"""Of XLA, at most, for one sentence model in one dtype: one for each size that batches are padded to, and to spare."""
DIGITS_ACCURACY = 0.97
DIGITS_LOSS = 0.005


def check_sentences(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Every expectation about the sentence model that was missed, in words."""
    for outcome in outcomes:
        wanted, found = COSINE[outcome.scheme], outcome.quality
        if found.cosine_mean < wanted:
            yield f"{outcome.scheme}: mean cosine to float32 is {found.cosine_mean:.4f}, expected {wanted}; {WHY}"
        if outcome.scheme in EACH_SENTENCE and found.cosine_min < wanted:
            yield f"{outcome.scheme}: smallest cosine to float32 is {found.cosine_min:.4f}, expected {wanted}; {WHY}"
        if outcome.left:
            yield f"{outcome.scheme}: layers left in float: {', '.join(outcome.left)}"


def check_served(models: Mapping[tuple[str, str], nn.Module], wanted: str) -> Iterator[str]:
    """Every model with layers that plain torch ops serve although there is a plugin called ``wanted``."""
    plugins = {status.name for status in qcore.plugins() if status.state == "available"}
    for (scheme, dtype), model in models.items():
        slow = [layer.name for layer in qcore.report(model).by_state("quantized") if layer.plugin == "torch"]
        if slow and wanted in plugins:
            yield f"{scheme} in {dtype}: {len(slow)} layers are served by plain torch ops, such as {slow[0]}"


def check_programs(models: Mapping[tuple[str, str], WholeProgram]) -> Iterator[str]:
    """Every model that XLA compiled too often, or not as a whole, in words."""
    for (scheme, dtype), model in models.items():
        name = f"{scheme or 'not quantized'} in {dtype}"
        if not 0 < model.compilations <= COMPILATIONS:
            yield f"{name}: XLA compiled {model.compilations} times, expected 1 to {COMPILATIONS}"
        yield from (f"{name}: {line}" for line in check_whole(graphs.explain(model)))


def check_whole(found: graphs.Explanation) -> Iterator[str]:
    """What of a compiled model the device does not run, in words."""
    for one in found.refused:
        yield f"the whole model runs in torch: {one}"
    for node in found.host:
        yield f"a node of the whole model stays on the host: {node}"


def check_digits(results: Iterable[Accuracy]) -> Iterator[str]:
    """Every expectation about the digits that was missed, in words."""
    for result in results:
        if result.before < DIGITS_ACCURACY:
            yield f"digits: accuracy in float is {result.before:.1%}, expected at least {DIGITS_ACCURACY:.0%}"
        if result.before - result.after > DIGITS_LOSS:
            lost = (result.before - result.after) * 100
            yield f"digits {result.scheme}: {lost:.2f} points of accuracy lost, expected at most {DIGITS_LOSS * 100}"


def check_language(found: Sequence[Written]) -> Iterator[str]:
    """Every expectation about the language model that was missed, in words; the first of ``found`` is not quantized."""
    plain, *others = found
    for one in others:
        ratio, size = one.perplexity / plain.perplexity, one.file_bytes / plain.file_bytes
        if not ratio <= PERPLEXITY[one.scheme]:
            yield (
                f"{one.scheme}: perplexity is {one.perplexity:.2f}, in float {plain.perplexity:.2f}; expected at most "
                f"{PERPLEXITY[one.scheme]} times that"
            )
        if size > FILE_SIZE[one.scheme]:
            yield f"{one.scheme}: its file is {size:.3f} of bfloat16, expected at most {FILE_SIZE[one.scheme]}"
