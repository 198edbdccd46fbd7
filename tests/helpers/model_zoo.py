"""Tiny language models of transformers, random and quantized, and what they compute."""

import pytest
import torch

import qcore

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
MODELS = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mixtral": ("MixtralConfig", MOE),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "phi3": ("Phi3Config", {}),
    "gemma2": ("Gemma2Config", {**GEMMA, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "num_hidden_layers": 6, "tie_word_embeddings": True}),
}


def tiny(name, **changed):
    """A random model, its norms and biases too."""
    kind, options = MODELS[name]
    config = getattr(transformers, kind)(**{**SIZES, **options, **changed})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def saved(model, folder):
    """A quantized checkpoint as `qcore.save` and transformers make it."""
    qcore.save(model, folder)
    model.config.save_pretrained(folder)
    return folder


def quantized(name, folder, scheme="w4a16-g32", **changed):
    model = tiny(name, **changed).half()
    qcore.quantize_(model, scheme)
    return loaded(model, saved(model, folder))


def loaded(model, path):
    """The same architecture with the weights of a checkpoint, in float32."""
    torch.manual_seed(8)
    found = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    qcore.load_(found, path)
    return found


def logits(model):
    with torch.no_grad():
        return model(torch.arange(40).view(2, 20) % 96).logits
