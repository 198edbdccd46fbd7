"""The vocabulary of a model in GGUF's form, from the ``tokenizer.json`` or ``tokenizer.model`` next to its weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, QcoreWarning
from ..header import file_error
from ..model_config import read_json
from .gguf_names import gguf_package

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SCORE_OF_ADDED = -1000.0
_FILE, _SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_WORDS % "{1,3}": "llama-bpe", _WORDS % "": "qwen2"}
"""llama.cpp's names of pre-tokenizers, which split text into words, by their regular expressions."""


def add_vocabulary(writer: Any, folder: Path, size: int) -> None:
    """Write the vocabulary in ``folder`` to a `gguf.GGUFWriter`: ``size`` tokens, as many as there are embeddings.

    If there is no vocabulary, the file states this and a warning is issued. Raises `CheckpointError` for a vocabulary
    that llama.cpp's tokenizers do not support.
    """
    tokenizer, bytewise = read_json(folder / _FILE), False
    try:
        if tokenizer:
            bytewise = _add_tokens(writer, tokenizer, folder, size)
        elif (folder / _SENTENCEPIECE).is_file():
            _add_pieces(writer, folder, size)
        else:
            what = f"{folder}: it has no {_FILE} and no {_SENTENCEPIECE}; the GGUF file will have no vocabulary."
            warnings.warn(what, QcoreWarning, stacklevel=2)
            writer.add_tokenizer_model("no_vocab")
        gguf_package().SpecialVocab(folder, load_merges=bytewise, n_vocab=size).add_to_gguf(writer, quiet=True)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        what = f"it is damaged: {type(error).__name__}: {error}."
        raise file_error(folder / _FILE, what, "Download it again.") from error


def _add_tokens(writer: Any, tokenizer: Mapping[str, Any], folder: Path, size: int) -> bool:
    """Write the tokens of a ``tokenizer.json``. Returns whether they are byte-level and need merges."""
    model = tokenizer["model"]
    parts = {part["type"] for part in _leaves(tokenizer, ("pre_tokenizer", "decoder"))}
    if model.get("type") != "BPE" or not (model.get("byte_fallback") or "ByteLevel" in parts):
        what = f"its model is {str(model.get('type'))[:40]!r}; GGUF supports byte-level BPE and BPE with byte fallback."
        raise file_error(folder / _FILE, what, "Write the model in another format, e.g. --to gptq.")
    bytewise = not model.get("byte_fallback")
    tokens = _Tokens(folder, size)
    for text, number in model["vocab"].items():
        kind = _BYTE if not bytewise and _BYTE_TOKEN.fullmatch(text) else _NORMAL
        tokens.put(number, text, _UNKNOWN if not bytewise and text == model.get("unk_token") else kind)
    for added in tokenizer.get("added_tokens") or ():
        number, known = added["id"], added["content"] in model["vocab"]
        kind = _CONTROL if added.get("special") else _USER_DEFINED
        if not known or tokens.kinds.get(number) == _NORMAL:
            tokens.put(number, added["content"], kind)
    writer.add_tokenizer_model("gpt2" if bytewise else "llama")
    writer.add_tokenizer_pre(_rule(tokenizer, folder) if bytewise else "default")
    if not bytewise:
        scores = _scores(model["merges"])
        writer.add_token_scores([scores.get(text, _SCORE_OF_ADDED) for text in tokens.texts()])
        writer.add_add_space_prefix(_has_prefix(tokenizer))
    tokens.write(writer)
    return bytewise


def _add_pieces(writer: Any, folder: Path, size: int) -> None:
    """Write the tokens of a ``tokenizer.model``, read with the package gguf."""
    try:
        vocabulary = gguf_package().SentencePieceVocab(folder)
    except RuntimeError as error:  # the package sentencepiece is missing
        what = f"it cannot be read: {error}."
        raise file_error(folder / _SENTENCEPIECE, what, "Install it: pip install sentencepiece.") from error
    tokens, scores = _Tokens(folder, size), {}
    for number, (text, score, kind) in enumerate(vocabulary.all_tokens()):
        tokens.put(number, text.decode(), int(kind))
        scores[number] = score
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([scores.get(number, _SCORE_OF_ADDED) for number in range(size)])
    tokens.write(writer)


class _Tokens:
    """Tokens by number; numbers without a token are unused."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.named: dict[int, str] = {}
        self.kinds: dict[int, int] = {}

    def put(self, number: int, text: str, kind: int) -> None:
        if not 0 <= number < self.size:
            what = f"its token {text[:40]!r} has number {number}, but the model has {self.size} embeddings."
            raise file_error(self.folder / _FILE, what, "Use the tokenizer of this model.")
        self.named[number], self.kinds[number] = text, kind

    def texts(self) -> list[str]:
        return [self.named.get(number, f"[PAD{number}]") for number in range(self.size)]

    def write(self, writer: Any) -> None:
        writer.add_token_list(self.texts())
        writer.add_token_types([self.kinds.get(number, _UNUSED) for number in range(self.size)])


def _scores(merges: list[Any]) -> dict[str, float]:
    """Scores by the first merge that produces each token: llama.cpp merges the pair with the highest score."""
    found: dict[str, float] = {}
    for rank, merge in enumerate(merges):
        found.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), -float(rank))
    return found


def _leaves(tokenizer: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
    """The parts of a tokenizer under ``keys``; sequences are expanded."""
    waiting = [tokenizer.get(key) for key in keys]
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, dict):
            lists = ("pretokenizers", "decoders", "normalizers")
            waiting = [*(one for name in lists for one in part.get(name) or ()), *waiting]
            yield part


def _rule(tokenizer: Mapping[str, Any], folder: Path) -> str:
    """llama.cpp's name of the pre-tokenizer."""
    parts = list(_leaves(tokenizer, ("pre_tokenizer",)))
    patterns = [part["pattern"].get("Regex") for part in parts if part.get("type") == "Split"]
    if len(patterns) == 1 and patterns[0] in _SPLITS:
        return _SPLITS[patterns[0]]
    if not patterns and any(part.get("type") == "ByteLevel" and part.get("use_regex", True) for part in parts):
        single = any(part.get("type") == "Digits" and part.get("individual_digits") for part in parts)
        return "smollm" if single else "gpt-2"
    what = f"{folder / _FILE}: llama.cpp's name of its pre-tokenizer is unknown; the GGUF file names 'default'"
    warnings.warn(f"{what}, with which llama.cpp may tokenize some texts differently.", QcoreWarning, stacklevel=2)
    return "default"


def _has_prefix(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a space is put before the text."""
    parts = _leaves(tokenizer, ("normalizer", "pre_tokenizer"))
    return any(
        part.get("type") == "Prepend"
        or (part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never")
        for part in parts
    )
