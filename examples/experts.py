"""Quantize three tiny mixtures of experts inside transformers, and compare their logits; random weights, no download.

The logits of a quantized model must be those of the float model whose weights are replaced by what the quantized ones
stand for. The loss of accuracy of random weights means nothing; it is not printed.
"""

from __future__ import annotations

import copy
import sys
import warnings

from steps import step

with step("importing torch and transformers"):
    import torch
    import transformers
    from torch import nn

    import qcore

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MODELS = {
    "Mixtral": {},
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 48, "head_dim": 16},
    "GptOss": {"head_dim": 16},
}
SCHEMES = ("w8a16", "w4a16-g32-asym", "mxfp4", "nvfp4")
ROUTERS = ("*.gate", "*.router")
CLOSE = 1e-5
"""Relative: both models compute in float32, in another order."""


def model(name: str, more: dict[str, int]) -> nn.Module:
    """A model with random weights, whose experts differ in which tokens they get."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    made: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.08)
    return made


def dequantized(plain: nn.Module, quantized: nn.Module) -> nn.Module:
    """A copy of ``plain`` with the weights that those of ``quantized`` stand for."""
    twin, modules = copy.deepcopy(plain), dict(quantized.named_modules())
    for name, module in twin.named_modules():
        found = modules.get(name)
        if isinstance(found, (qcore.nn.QuantizedLinear, qcore.nn.QuantizedEmbedding)):
            module.weight.data = found.weight.dequantize()
        if isinstance(found, qcore.nn.QuantizedExperts):
            for which, part in found.projections().items():
                dense = part.weight.dequantize()
                getattr(module, which).data = dense.transpose(1, 2) if module.is_transposed else dense
    return twin


def main() -> int:
    """Print a line per model and scheme; 1 if any is wrong."""
    wrong = 0
    transformers.logging.set_verbosity_error()
    ids = torch.randint(0, SIZES["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(1))
    print(f"{'model':10} {'scheme':16} {'experts':9} {'bytes':>7} {'error':>8}")
    for name, more in MODELS.items():
        plain = model(name, more)
        for scheme in SCHEMES:
            quantized = copy.deepcopy(plain)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", qcore.QcoreWarning)  # each model has one of the two kinds of routers
                report = qcore.quantize_(quantized, scheme, exclude=ROUTERS)
            rows = [row for row in report if ".experts." in row.name and row.state == "quantized"]
            with torch.no_grad():
                found, expected = quantized(ids).logits, dequantized(plain, quantized)(ids).logits
            error = float((found - expected).norm() / expected.norm())
            share = sum(row.bytes_after for row in rows) / max(1, sum(row.bytes_before for row in rows))
            wrong += not (error < CLOSE and len(rows) == 2 * SIZES["num_hidden_layers"])
            print(f"{name:10} {scheme:16} {len(rows):9} {share:7.0%} {error:8.1e}")
        tokens = quantized.generate(ids, max_new_tokens=4, do_sample=False)
        wrong += tokens.shape[1] != ids.shape[1] + 4
    print("wrong" if wrong else "every model computes what its quantized weights stand for")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
