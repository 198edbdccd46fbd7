"""Tiny models with random weights, quantized and stored in each way that vLLM is given them, and their tokens.

The tokens are what transformers generates from the same weights, in float32.
"""

from __future__ import annotations

import torch
import transformers
from serving import PROMPTS, STEPS

import qcore

SCHEME = "w4a16-g32-asym@minmax"
FLOAT_PARTS = ["embed_tokens", "lm_head"]


def llama(seed=0, **changes):
    """Three layers of 160, four heads over two; K of ``down_proj`` is 80 on each of four ranks: 2.5 groups."""
    sizes = {
        "vocab_size": 384, "hidden_size": 160, "intermediate_size": 320, "num_hidden_layers": 3, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "attention_bias": True,
        "mlp_bias": True, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    return randomized(transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes})))


def mixtral(seed=1):
    """Two layers with four experts, two for each token."""
    torch.manual_seed(seed)
    config = transformers.MixtralConfig(
        vocab_size=384, hidden_size=128, intermediate_size=192, num_hidden_layers=2, head_dim=32, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    return randomized(transformers.MixtralForCausalLM(config))


def gpt2(seed=4):
    """Two layers of Conv1D, which float checkpoints store as (K, N) and vLLM transposes."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=384, n_embd=128, n_layer=2, n_head=4, n_positions=256)
    return randomized(transformers.GPT2LMHeadModel(config))


def gpt_oss(seed=5):
    """Two layers whose experts alternate gate and up, and are stored as (E, K, N) in float checkpoints."""
    torch.manual_seed(seed)
    config = transformers.GptOssConfig(
        vocab_size=384, hidden_size=128, intermediate_size=192, num_hidden_layers=2, head_dim=32, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256,
        layer_types=["full_attention"] * 2, tie_word_embeddings=False,
    )  # fmt: skip
    return randomized(transformers.GptOssForCausalLM(config))


def randomized(model):
    """Weights with which each token depends on those before: at their usual sizes one token repeats."""
    model.config.architectures = [type(model).__name__]
    for name, parameter in model.eval().named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else 0.15)
    return model


def generated(model, prompts=PROMPTS, steps=STEPS):
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, min_new_tokens=steps, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        found.append(made[0, len(prompt) :].tolist())
    return found


def stored(model, folder, scheme=SCHEME, **settings):
    """Quantize a model and save it as qcore does."""
    folder.mkdir()
    qcore.quantize_(model, scheme, **settings)
    model.config.save_pretrained(folder)
    qcore.save(model, folder)
    return generated(model)


def at_load(model, folder, scheme=SCHEME, **settings):
    """Save a float model; the tokens are those of the quantized one."""
    model.save_pretrained(folder)
    qcore.quantize_(model, scheme, **settings)
    return generated(model)


def streamed(model, folder, **settings):
    """Quantize file by file: experts stay separate, and ``config.json`` says what qcore did."""
    float_folder = folder.with_name("float")
    model.save_pretrained(float_folder)
    from qcore.checkpoint import quantize_checkpoint

    quantize_checkpoint(float_folder, folder, **settings)
    quantized = type(model)(model.config).eval()
    qcore.load_(quantized, folder)
    return generated(quantized)


def converted(folder, to):
    """A checkpoint in the format of another tool."""
    own = folder.with_name("own")
    model = llama(attention_bias=False, mlp_bias=False)
    stored(model, own, exclude=FLOAT_PARTS)
    qcore.convert(own, folder, to=to, dtype=torch.float16)
    again = llama(attention_bias=False, mlp_bias=False)
    qcore.load_(again, folder)
    return generated(again)


def act_order(folder):
    """Columns in an order of their own, as of GPTQ's act-order, a different one for each layer."""
    model = llama(attention_bias=False, mlp_bias=False)
    qcore.quantize_(model, SCHEME, exclude=FLOAT_PARTS)
    for layer in model.modules():
        if isinstance(layer, qcore.nn.QuantizedLinear):
            layer.weight = layer.weight.derived(order=torch.randperm(layer.in_features, dtype=torch.int32))
    folder.mkdir()
    model.config.save_pretrained(folder)
    qcore.save(model, folder)
    return generated(model)


def static(folder):
    """Static activations, calibrated."""
    batches = [torch.randint(0, 384, (4, 32)) for _ in range(2)]
    return stored(llama(), folder, "w8a8-static", exclude=FLOAT_PARTS, calibration=batches)


MIXED = {"*.q_proj": "w8a16", "*.v_proj": "w4a16-g32", "*": SCHEME}
NO_ROUTER = ["embed_tokens", "*.gate"]
MODELS = {
    "biases": lambda folder: stored(llama(), folder),
    "tied": lambda folder: stored(llama(tie_word_embeddings=True), folder),
    "partly": lambda folder: stored(
        llama(tie_word_embeddings=True), folder, exclude=["embed_tokens", "lm_head", "*.v_proj", "*.1.mlp.*"]
    ),
    "mixed": lambda folder: stored(llama(), folder, MIXED),
    "w8a8": lambda folder: stored(llama(), folder, "w8a8", exclude=FLOAT_PARTS),
    "gpt2": lambda folder: stored(gpt2(), folder),
    "gpt-oss": lambda folder: stored(gpt_oss(), folder, exclude=["*.router"]),
    "mxfp4": lambda folder: stored(llama(), folder, "mxfp4", exclude=FLOAT_PARTS),
    "float": lambda folder: at_load(llama(), folder),
    "float-tied": lambda folder: at_load(llama(tie_word_embeddings=True), folder, exclude=["lm_head", "*.v_proj"]),
    "gptq": lambda folder: converted(folder, "gptq"),
    "awq": lambda folder: converted(folder, "awq"),
    "compressed-tensors": lambda folder: converted(folder, "compressed-tensors"),
    "act-order": act_order,
    "static": static,
    "experts": lambda folder: stored(mixtral(), folder, "w4a16-g32@absmax", exclude=NO_ROUTER),
    "experts-with-embedding": lambda folder: stored(mixtral(), folder, "w4a16-g32@absmax", exclude=["*.gate"]),
    "embedding-of-experts": lambda folder: stored(mixtral(), folder, "w8a16", include=["embed_tokens"]),
    "experts-streamed": lambda folder: streamed(mixtral(), folder, scheme="w4a16-g32@absmax", exclude=NO_ROUTER),
    "experts-float": lambda folder: at_load(mixtral(), folder, "w4a16-g32@absmax", exclude=NO_ROUTER),
    "experts-excluded": lambda folder: stored(mixtral(), folder, "w4a16-g32@absmax", exclude=[*NO_ROUTER, "*.experts"]),
}
