"""Mixtures of experts whose files store experts one by one: joined, quantized or float, into transformers' models."""

import copy
import json

import pytest
import torch
from foreign_writers import write_directory
from safetensors.torch import load_file, save_file

import qcore

transformers = pytest.importorskip("transformers")

Auto = transformers.AutoModelForCausalLM
SIZES = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts": 3,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "tie_word_embeddings": False,
}  # fmt: skip
IDS = torch.arange(18).reshape(2, 9)
KINDS = ("MixtralConfig", "Qwen3MoeConfig")


def config(kind):
    return getattr(transformers, kind)(**SIZES)


@pytest.fixture(params=KINDS)
def saved(request, tmp_path):
    """A random model, and the directory where its experts are stored one by one."""
    torch.manual_seed(0)
    model = Auto.from_config(config(request.param)).eval()
    model.save_pretrained(tmp_path / "float")
    state = load_file(tmp_path / "float" / "model.safetensors")
    assert any(".experts.0." in name for name in state)
    return model, state, tmp_path


def empty(model):
    with torch.device("meta"):
        return Auto.from_config(copy.deepcopy(model.config)).eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_float_experts(saved):
    model, _, folder = saved
    loaded = empty(model)
    qcore.load_(loaded, folder / "float")
    assert torch.equal(logits(loaded), logits(model))


def test_quantized_by_the_command_line(saved):
    model, _, folder = saved
    qcore.checkpoint.quantize_checkpoint(folder / "float", folder / "own", "w8a16", exclude=["*.gate"])
    loaded = empty(model)
    report = qcore.load_(loaded, folder / "own")
    assert any(isinstance(m, qcore.nn.QuantizedExperts) for m in loaded.modules())
    assert all(row.state == "quantized" or "gate" in row.name or "norm" in row.name for row in report)
    qcore.quantize_(model, "w8a16", exclude=["*.gate"])
    torch.testing.assert_close(logits(loaded), logits(model))
    qcore.save(loaded, folder / "again")
    again = empty(model)
    qcore.load_(again, folder / "again")
    assert torch.equal(logits(again), logits(loaded))


@pytest.mark.parametrize("format", ["gptq", "compressed-tensors W4A16", "MXFP4", "bitsandbytes NF4"])
def test_of_other_tools(format, saved):
    model, state, folder = saved
    layers = [n.removesuffix(".weight") for n, t in state.items() if ".experts." in n and t.dim() == 2]
    dense = write_directory(folder / "foreign", model.config.to_dict(), state, layers, format)
    loaded = empty(model)
    qcore.load_(loaded, folder / "foreign")
    (folder / "dense").mkdir()
    save_file(dense, folder / "dense" / "model.safetensors", {"format": "pt"})
    (folder / "dense" / "config.json").write_text(json.dumps(model.config.to_dict()))
    expected = empty(model)
    qcore.load_(expected, folder / "dense")
    torch.testing.assert_close(logits(loaded), logits(expected), rtol=1e-3, atol=1e-4)


def test_experts_of_different_formats_are_an_error(saved):
    model, state, folder = saved
    layers = [n.removesuffix(".weight") for n, t in state.items() if ".experts.0." in n and t.dim() == 2]
    write_directory(folder / "foreign", model.config.to_dict(), state, layers, "gptq")
    with pytest.raises(qcore.CheckpointError, match="experts"):
        qcore.load_(empty(model), folder / "foreign")


def test_through_from_pretrained(saved):
    import qcore.hf

    model, state, folder = saved
    qcore.checkpoint.quantize_checkpoint(folder / "float", folder / "own", "w8a16", exclude=["*.gate"])
    loaded, other = Auto.from_pretrained(folder / "own"), empty(model)
    qcore.load_(other, folder / "own")
    assert torch.equal(logits(loaded), logits(other))
    layers = [n.removesuffix(".weight") for n, t in state.items() if ".experts." in n and t.dim() == 2]
    write_directory(
        folder / "gptq", {**model.config.to_dict(), "architectures": [type(model).__name__]}, state, layers, "gptq"
    )
    qcore.hf.adopt("gptq")
    loaded, other = Auto.from_pretrained(folder / "gptq"), empty(model)
    qcore.load_(other, folder / "gptq")
    assert torch.equal(logits(loaded), logits(other))
