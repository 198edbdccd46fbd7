"""The language model as one program per token on a Vulkan device, beside the same layers one by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from qcore import graphs


@dataclass(frozen=True)
class Compared:
    """Tokens per second layer by layer and as a whole, tokens until the two texts differ, and what `explain` says."""

    layers: float
    whole: float
    same: int
    report: graphs.Explanation


def compare(model: Any, ids: Tensor, new: int) -> Compared:
    """Write ``new`` tokens after ``ids`` ``(1, L)``, greedily, both ways; each is measured the second time."""
    torch._dynamo.reset()  # noqa: SLF001 - what was compiled before stays out of the report
    compiled = torch.compile(model, backend="qcore_vulkan")
    layers, whole = _measured(model, model, ids, new), _measured(model, compiled, ids, new)
    same = next((i for i, pair in enumerate(zip(layers[0], whole[0], strict=True)) if pair[0] != pair[1]), new)
    return Compared(layers[1], whole[1], same, graphs.explain(compiled))


def _measured(model: Any, call: Callable[..., Any], ids: Tensor, new: int) -> tuple[list[int], float]:
    """A text and its tokens per second, without the prompt."""
    _written(model, call, ids, 2)  # compiles
    return _written(model, call, ids, new)


@torch.no_grad()
def _written(model: Any, call: Callable[..., Any], ids: Tensor, new: int) -> tuple[list[int], float]:
    config = model.config
    cache = StaticCache(config=config, max_cache_len=128)
    size = config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, config.num_key_value_heads, size, model.dtype, ids.device)
    place, text, start = torch.arange(ids.shape[1]), [], 0.0
    while len(text) < new:
        logits = call(input_ids=ids, past_key_values=cache, position_ids=place[None], use_cache=True).logits[:, -1]
        ids, place = logits.argmax(-1, keepdim=True), place[-1:] + 1
        text.append(int(ids))
        start = start or time.perf_counter()
    return text, (new - 1) / (time.perf_counter() - start)
