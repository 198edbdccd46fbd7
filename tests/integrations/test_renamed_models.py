"""Models that transformers gives other names than their files have, and those that tie weights their files store once.

Files of multimodal models and of GPT-NeoX have the names of earlier versions of transformers.
"""

import contextlib
import copy
import json

import pytest
import torch
from foreign_writers import write_directory
from safetensors.torch import load_file, save_file

import qcore

transformers = pytest.importorskip("transformers")

import qcore.hf  # noqa: E402
from qcore.hf import QcoreConfig  # noqa: E402

TEXT = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
IDS = torch.arange(18).reshape(2, 9)


def llava():
    text, vision = transformers.LlamaConfig(**TEXT), transformers.CLIPVisionConfig(**VISION)
    return transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=95)


def gemma3():
    text, vision = transformers.Gemma3TextConfig(**TEXT), transformers.SiglipVisionConfig(**VISION)
    return transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)


def neox():
    sizes = {name: size for name, size in TEXT.items() if name not in ("num_key_value_heads", "head_dim")}
    return transformers.GPTNeoXConfig(**sizes)


RENAMED = {
    "LlavaForConditionalGeneration": llava,
    "Gemma3ForConditionalGeneration": gemma3,
    "GPTNeoXForCausalLM": neox,
}
TIED = {
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(**TEXT, tie_word_embeddings=True),
    "Gemma3ForCausalLM": lambda: transformers.Gemma3TextConfig(**TEXT),  # its embedding stays float, and so its head
    "T5ForConditionalGeneration": lambda: transformers.T5Config(
        vocab_size=96, d_model=64, d_kv=32, d_ff=96, num_layers=1, num_heads=2, decoder_start_token_id=0
    ),
}


def made(kind, folder):
    """A random model, saved as float, and a function that makes an equal one with other values."""
    torch.manual_seed(0)
    cls, config = getattr(transformers, kind), {**RENAMED, **TIED}[kind]()
    model = cls(config).eval()
    model.save_pretrained(folder / "float")
    return model, lambda: cls(copy.deepcopy(config)).eval()


def logits(model):
    more = {"decoder_input_ids": IDS[:, :4]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=IDS, **more).logits


@pytest.mark.parametrize("kind", [*RENAMED, *TIED])
def test_quantized_by_the_command_line(kind, tmp_path):
    model, new = made(kind, tmp_path)
    qcore.checkpoint.quantize_checkpoint(tmp_path / "float", tmp_path / "own", "w8a16")
    loaded = type(model).from_pretrained(tmp_path / "own").eval()
    assert not any(tensor.is_meta for tensor in loaded.parameters())
    wanted = logits(model)
    assert float((logits(loaded) - wanted).norm() / wanted.norm()) < 0.05
    other = new()
    qcore.load_(other, tmp_path / "own")
    assert torch.equal(logits(other), logits(loaded))
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "again")), logits(loaded))


@pytest.mark.parametrize("kind", RENAMED)
def test_float_tensors(kind, tmp_path):
    model, new = made(kind, tmp_path)
    assert not load_file(tmp_path / "float" / "model.safetensors").keys() <= model.state_dict().keys()
    loaded = new()
    qcore.load_(loaded, tmp_path / "float")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("kind", RENAMED)
@pytest.mark.parametrize("format", ["gptq", "bitsandbytes NF4", "compressed-tensors W4A16"])
def test_of_other_tools(kind, format, tmp_path):
    model, new = made(kind, tmp_path)
    state = load_file(tmp_path / "float" / "model.safetensors")
    layers = [n.removesuffix(".weight") for n in state if n.endswith(("up_proj.weight", "fc1.weight", "dense.weight"))]
    settings = {**model.config.to_dict(), "architectures": [kind]}
    dense = write_directory(tmp_path / "foreign", settings, state, layers, format)
    save_file(
        {name: t.clone() for name, t in dense.items()}, tmp_path / "float" / "model.safetensors", {"format": "pt"}
    )
    expected = type(model).from_pretrained(tmp_path / "float").eval()
    qcore.hf.adopt()
    loaded, other = type(model).from_pretrained(tmp_path / "foreign").eval(), new()
    report = qcore.load_(other, tmp_path / "foreign")
    assert sum(row.state == "quantized" for row in report) == len(layers)
    assert torch.equal(logits(other), logits(loaded))
    torch.testing.assert_close(logits(loaded), logits(expected), rtol=1e-3, atol=1e-4)


def test_torchao_describes_the_names_of_the_model(tmp_path):
    """transformers renames the tensors of a file back, but not the descriptions in its metadata."""
    model, new = made("LlavaForConditionalGeneration", tmp_path)
    state = load_file(tmp_path / "float" / "model.safetensors")
    (name,) = (n for n in state if n.endswith("layers.0.mlp.up_proj.weight") and "language" in n)
    weight = qcore.quantize(state.pop(name), "int8", "absmax")
    start = name.removesuffix("weight")
    state |= {f"{start}_weight_qdata": weight.codes(), f"{start}_weight_scale": weight.scale.t().contiguous()}
    about = {"block_size": [1, 128], "act_quant_kwargs": None}
    described = {"_type": "Int8Tensor", "_data": about, "_tensor_data_names": ["qdata", "scale"]}
    metadata = {"model.language_model.layers.0.mlp.up_proj.weight": json.dumps(described)}
    save_file(state, tmp_path / "float" / "model.safetensors", metadata)
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "float" / "config.json").write_text(json.dumps(config))
    loaded = new()
    qcore.load_(loaded, tmp_path / "float")
    found = loaded.model.language_model.layers[0].mlp.up_proj.weight
    assert torch.equal(found.dequantize(), weight.dequantize())


@pytest.mark.parametrize("tied", [True, False])
def test_a_base_model_from_one_with_a_head(tied, tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TEXT, tie_word_embeddings=tied, pad_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "float")
    qcore.checkpoint.quantize_checkpoint(tmp_path / "float", tmp_path / "own", "w8a16")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own").eval()

    def states(model):
        with torch.no_grad():
            return model(IDS).last_hidden_state

    ignored = contextlib.nullcontext() if tied else pytest.warns(qcore.QcoreWarning, match="no layer for them: lm_head")
    with ignored:
        base = transformers.AutoModel.from_pretrained(tmp_path / "own").eval()
    assert torch.equal(states(base), states(whole.model))
    other = transformers.LlamaModel(config).eval()
    qcore.load_(other, tmp_path / "own", strict=tied)
    assert torch.equal(states(other), states(whole.model))
    if not tied:
        with pytest.warns(qcore.QcoreWarning, match="lm_head"):
            judge = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "own")
        assert torch.equal(states(judge.model.eval()), states(whole.model))


def test_blocks_that_the_model_lacks_are_an_error(tmp_path):
    made("LlamaForCausalLM", tmp_path)
    qcore.checkpoint.quantize_checkpoint(tmp_path / "float", tmp_path / "own", "w8a16")
    with pytest.raises(qcore.CheckpointError, match="no layer for 7 of its quantized weights"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own", num_hidden_layers=1)


def test_two_values_for_tied_weights_stay_two(tmp_path):
    """The configuration ties the head, but the file holds another one, as transformers' own loader has it."""
    model, _ = made("LlamaForCausalLM", tmp_path)
    state = load_file(tmp_path / "float" / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(state, tmp_path / "float" / "model.safetensors", {"format": "pt"})
    wanted = logits(type(model).from_pretrained(tmp_path / "float"))
    qcore.checkpoint.quantize_checkpoint(tmp_path / "float", tmp_path / "own", "w8a16")
    found = logits(type(model).from_pretrained(tmp_path / "own"))
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


def test_a_tensor_under_both_names_is_listed(tmp_path):
    _, new = made("GPTNeoXForCausalLM", tmp_path)
    state = load_file(tmp_path / "float" / "model.safetensors")
    state["lm_head.weight"] = state["embed_out.weight"].clone()
    save_file(state, tmp_path / "both.safetensors", {"format": "pt"})
    with pytest.raises(qcore.CheckpointError, match=r"Not used by the model: embed_out\.weight\."):
        qcore.load_(new(), tmp_path / "both.safetensors")


def test_quantized_while_loading(tmp_path):
    model, _ = made("LlavaForConditionalGeneration", tmp_path)
    config = QcoreConfig("w8a16", exclude=["*vision_tower*"])
    loaded = type(model).from_pretrained(tmp_path / "float", quantization_config=config).eval()
    loaded.save_pretrained(tmp_path / "own")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "own")), logits(loaded))
