"""Tiny random models of transformers of several kinds, and their outputs; as a program, loads directories of them."""

import sys
from pathlib import Path

import torch
import transformers

SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
DECODER = {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False}
EXPERTS = {
    **DECODER, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "head_dim": 32,
}  # fmt: skip
GPT2 = {"vocab_size": 128, "n_embd": 128, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}
IMAGES = {**{name: size for name, size in SIZES.items() if name != "vocab_size"}, "image_size": 32, "patch_size": 8}
T5 = {"vocab_size": 128, "d_model": 128, "d_kv": 32, "d_ff": 192, "num_layers": 2, "num_heads": 4}
SEQ2SEQ = {
    "vocab_size": 128, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192, "scale_embedding": True,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
KINDS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "tied-llama": ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", DECODER),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", EXPERTS),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", EXPERTS),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGES),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**SIZES, "num_key_value_heads": 2, "head_dim": 32}),
    "bart": ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
}
"""Name to the class of the model, that of its configuration, and its settings."""
IDS = torch.arange(24).reshape(2, 12) % 128


def built(kind, **more):
    """A random model, the same in every call."""
    model, config, settings = KINDS[kind]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**settings, **more)).eval()


def loaded_float(kind, folder):
    """The same from a directory, with what ``from_pretrained`` adds to a model."""
    model = built(kind)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def outputs(model):
    """Logits for fixed inputs."""
    if model.main_input_name == "pixel_values":
        given = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32).to(model.dtype)}
    else:
        given = {"input_ids": IDS, **({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})}
    with torch.no_grad():
        return model(**given).logits


def loaded_again(folder, kind):
    """Outputs of a directory's model, and the lists of its loading info that are not empty."""
    kinds = {name: getattr(transformers, about[0]) for name, about in KINDS.items()}
    model, about = kinds[kind].from_pretrained(folder, output_loading_info=True)
    return outputs(model), {name: sorted(map(str, found)) for name, found in about.items() if found}


if __name__ == "__main__":
    import qcore.hf  # noqa: F401 - registers the method

    root = Path(sys.argv[1])
    torch.save({kind: loaded_again(root / kind, kind) for kind in sys.argv[2:]}, root / "outputs.pt")
