"""``from_pretrained`` with a tp_plan on each of two ranks; tests/integrations/test_tensor_parallel.py starts it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from parallel_models import relative

TOKENS = torch.tensor([[1, 5, 9, 2, 33, 17]])


def settings(**more: Any) -> dict[str, Any]:
    """A tiny Llama with biases and grouped queries; 176 hidden features are 2.75 groups of 32 per rank."""
    small = {"hidden_size": 128, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}
    return {**small, **heads, **more}


def _load(name: str, rank: int, world: int, **given: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import qcore.hf  # noqa: F401 - registers qcore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    config = DistributedConfig(tp_plan="auto", tp_size=world)
    return AutoModelForCausalLM.from_pretrained(folder() / name, distributed_config=config, **given).eval()


def folder() -> Path:
    """A folder that all processes of the test know."""
    return Path(os.environ["QCORE_CACHE_DIR"]).parents[1]


def _compared(model: Any, name: str) -> dict[str, Any]:
    with torch.no_grad():
        logits = model(TOKENS).logits
        tokens = model.generate(TOKENS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    want = torch.load(folder() / f"{name}.pt")
    kinds = {name: type(m).__name__ for name, m in model.named_modules() if "Parallel" in type(m).__name__}
    return {"error": relative(logits, want["logits"]), "same": torch.equal(tokens, want["tokens"]), "kinds": kinds}


def stored(rank: int, world: int, name: str) -> dict[str, Any]:
    """A directory with quantized weights; counts the bytes of weights that are read."""
    from qcore.checkpoint import archive, slices

    counts = {"parts": 0, "whole": 0}
    read_at, read_tensor = slices._read_at, archive.read_tensor

    def counting(file: Any, offset: int, into: memoryview) -> int:
        counts["parts"] += len(into)
        return read_at(file, offset, into)

    def counting_whole(file: Any, entry: Any, path: Any) -> Any:
        counts["whole"] += entry.nbytes
        return read_tensor(file, entry, path)

    slices._read_at, archive.read_tensor = counting, counting_whole
    try:
        model = _load(name, rank, world)
    finally:
        slices._read_at, archive.read_tensor = read_at, read_tensor
    try:
        model.save_pretrained(folder() / f"again{rank}")
        refused = "nothing was raised"
    except Exception as error:  # noqa: BLE001
        refused = f"{type(error).__name__}: {error}"
    return {**_compared(model, name), **counts, "refused": refused}


def on_the_fly(rank: int, world: int) -> dict[str, Any]:
    """Quantized while it is loaded."""
    import qcore.hf

    model = _load("float", rank, world, quantization_config=qcore.hf.QcoreConfig("w8a16"))
    return _compared(model, "fly")


def left_float(rank: int, world: int) -> dict[str, Any]:
    """A layer that is left float is distributed by transformers, between layers of qcore."""
    import qcore.hf

    config = qcore.hf.QcoreConfig("w8a16", exclude=["lm_head", "*.0.mlp.up_proj"])
    return _compared(_load("float", rank, world, quantization_config=config), "left")


CASES = {
    "stored": lambda rank, world: stored(rank, world, "quantized"),
    "experts": lambda rank, world: stored(rank, world, "moe"),
    "on the fly": on_the_fly,
    "left float": left_float,
}
