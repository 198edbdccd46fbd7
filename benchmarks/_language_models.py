"""Language models in GGUF files as float models, and their perplexity: what `perplexity` measures quantizers with.

Needs ``transformers==5.23.0`` and ``gguf``, which are no requirements of qcore: use an environment of their own.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_LOGITS = 1 << 28
"""Elements of logits computed at a time (1 GiB of float32): a vocabulary of 262144 times every token is too much."""


def load(gguf: Path, cache: Path) -> tuple[nn.Module, Any]:
    """The dequantized float32 model of a GGUF file, and its tokenizer; both are kept in ``cache``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kept = cache / gguf.stem
    if not (kept / "model.pt").exists():
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        AutoTokenizer.from_pretrained(**where).save_pretrained(kept)
        # Not save_pretrained: transformers takes the dequantized model for a quantized one and refuses.
        torch.save(AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32), kept / "model.pt")
    # A pickle, but one that this script wrote.
    model = torch.load(kept / "model.pt", mmap=True, weights_only=False)
    return model.eval(), AutoTokenizer.from_pretrained(kept)


def joined(parts: list[Path], cache: Path) -> Path:
    """One file of a GGUF that a package ships in pieces."""
    if len(parts) == 1:
        return parts[0]
    whole = cache / parts[0].name.split(".part")[0]
    if not whole.exists():
        cache.mkdir(parents=True, exist_ok=True)
        whole.write_bytes(b"".join(part.read_bytes() for part in sorted(parts)))
    return whole


def windows(text: str, tokenizer: Any, window: int) -> Tensor:
    """The tokens of a text in rows of ``window``, each with the beginning-of-text token if the model has one."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = window - len(start)
    rows = [start + ids[at : at + room] for at in range(0, len(ids) - room + 1, room)]
    return torch.tensor(rows, dtype=torch.int64)


def read_text(path: Path) -> str:
    """A text file, gzip (dictzip, too) or plain; lines of a paragraph are joined, for models know no hard wrapping."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8", errors="replace")
    paragraphs = ("\n".join(line.strip() for line in part.splitlines()) for part in text.split("\n\n"))
    return "\n\n".join(part for part in paragraphs if part)


@torch.no_grad()
def perplexity(model: nn.Module, rows: Tensor) -> float:
    """``exp`` of the mean negative log likelihood of every token but the first of each row."""
    total, count = 0.0, 0
    for tokens in rows.split(4):
        hidden = model.base_model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
        for states, wanted in _chunks(model, hidden, tokens[:, 1:].flatten()):
            total += float(nn.functional.cross_entropy(model.lm_head(states).float(), wanted, reduction="sum"))
            count += len(wanted)
    return math.exp(total / count)


def _chunks(model: nn.Module, hidden: Tensor, wanted: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows = max(1, _LOGITS // model.config.vocab_size)
    return zip(hidden.split(rows), wanted.split(rows), strict=True)
