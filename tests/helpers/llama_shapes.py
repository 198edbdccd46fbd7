"""Llamas without values, on torch's meta device, quantized: what compilers are given ahead of time."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import Decoder

import qcore

SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "vocabulary": 49152, "width": 576, "heads": 9, "kv_heads": 3, "inner": 1536, "layers": 30, "length": 2048,
    },
    "Llama-1.1B": {
        "vocabulary": 32000, "width": 2048, "heads": 32, "kv_heads": 4, "inner": 5632, "layers": 22, "length": 2048,
        "tied": False,
    },
    "Llama-8B": {
        "vocabulary": 128256, "width": 4096, "heads": 32, "kv_heads": 8, "inner": 14336, "layers": 32, "length": 4096,
        "tied": False,
    },
}  # fmt: skip


def llama(name: str, scheme: str | None, layers: int | None = None) -> Decoder:
    """The decoder in bfloat16 with a static KV cache, ``layers`` of its blocks if given; None: not quantized."""
    shape = SHAPES[name] | ({} if layers is None else {"layers": layers})
    with torch.device("meta"):
        model = Decoder(**shape).eval().to(torch.bfloat16)
    if scheme is not None:
        qcore.quantize_(model, scheme)
    return model


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``(1, count)`` and positions ``(count,)`` without values."""
    return (
        torch.empty(1, count, dtype=torch.long, device="meta"),
        torch.empty(count, dtype=torch.long, device="meta"),
    )
