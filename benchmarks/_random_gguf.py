"""A GGUF file of a Llama with random weights, for llama.cpp and qcore alike; texts that it writes mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Shape(NamedTuple):
    """Sizes of a Llama; ``width``, ``inner``: of the residual and of the MLP; ``words``: of the vocabulary."""

    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int
    words: int


SHAPES = {
    "random-1.1b": Shape(22, 2048, 5632, 32, 4, 32000),  # of the shared benchmark llama_generate.py
    "random-135m": Shape(30, 576, 1536, 9, 3, 49152),  # of SmolLM2-135M, but with a head of its own
}
_CONTEXT = 2048
_BLOCK = 32
"""Weights in a block of Q4_0 or Q8_0, behind a scale in float16."""


def write_random_llama(file: Path, shape: Shape) -> Path:
    """Write the model: linear layers and head in Q4_0, the table of embeddings in Q8_0. Needs the package gguf."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.key_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.words)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    _add_vocabulary(writer, shape.words)
    rng = np.random.default_rng(0)
    q4, q8 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", _blocks(rng, shape.words, shape.width, _BLOCK), raw_dtype=q8)
    writer.add_tensor("output.weight", _blocks(rng, shape.words, shape.width, _BLOCK // 2), raw_dtype=q4)
    writer.add_tensor("output_norm.weight", np.ones(shape.width, np.float32))
    width, inner, narrow = shape.width, shape.inner, shape.width // shape.heads * shape.key_heads
    shapes = {
        "attn_q": (width, width), "attn_k": (narrow, width), "attn_v": (narrow, width), "attn_output": (width, width),
        "ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner),
    }  # fmt: skip
    for layer in range(shape.layers):
        for name, (rows, columns) in shapes.items():
            weight = _blocks(rng, rows, columns, _BLOCK // 2)
            writer.add_tensor(f"blk.{layer}.{name}.weight", weight, raw_dtype=q4)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(shape.width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _blocks(rng: np.random.Generator, rows: int, columns: int, size: int) -> np.ndarray:
    """Blocks of a scale and ``size`` random bytes of codes; weights of a deviation of about .02."""
    blocks = rng.integers(0, 256, (rows, columns // _BLOCK, 2 + size), dtype=np.uint8)
    scale = np.float16(0.02 / (4.6 if size < _BLOCK else 74))
    blocks[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def _add_vocabulary(writer: Any, words: int) -> None:
    """One token for each byte, as GPT-2 spells them, and tokens that no text has."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokens = [spelled[byte] for byte in range(256)]
    tokens += [f"<unused{i}>" for i in range(len(tokens), words)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [5] * (words - 256))
    writer.add_token_merges(["a a"])
    writer.add_bos_token_id(words - 2)
    writer.add_eos_token_id(words - 1)
