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
OTHERS = {
    "OlmoeConfig": {"eos_token_id": 1},
    "PhimoeConfig": {},
    "Qwen2MoeConfig": {"shared_expert_intermediate_size": 128},
    "DeepseekV3Config": {
        "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 64,
        "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4,
        "head_dim": 16, "num_local_experts": 8,
    },
}  # fmt: skip
"""Architectures with other names or parts, and what their configurations need."""


def config(kind):
    return getattr(transformers, kind)(**{**SIZES, **OTHERS.get(kind, {})})


def stored(kind, folder):
    """A random model, its tensors and the directory where its experts are stored one by one."""
    torch.manual_seed(0)
    model = Auto.from_config(config(kind)).eval()
    model.save_pretrained(folder / "float")
    state = load_file(folder / "float" / "model.safetensors")
    assert any(".experts.0." in name for name in state)
    return model, state, folder


@pytest.fixture(params=KINDS)
def saved(request, tmp_path):
    return stored(request.param, tmp_path)


@pytest.fixture(params=[*KINDS, *OTHERS])
def any_saved(request, tmp_path):
    return stored(request.param, tmp_path)


def empty(model):
    with torch.device("meta"):
        return Auto.from_config(copy.deepcopy(model.config)).eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_float_experts(any_saved):
    model, _, folder = any_saved
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


def foreign_and_dense(format, saved):
    """The model with its experts in a format, and with the dense weights that they stand for."""
    model, state, folder = saved
    layers = [n.removesuffix(".weight") for n, t in state.items() if ".experts." in n and t.dim() == 2]
    dense = write_directory(folder / "foreign", model.config.to_dict(), state, layers, format)
    (folder / "dense").mkdir()
    save_file({n: t.clone() for n, t in dense.items()}, folder / "dense" / "model.safetensors", {"format": "pt"})
    models = [empty(model), empty(model)]
    for each, name in zip(models, ("foreign", "dense"), strict=True):
        qcore.load_(each, folder / name)
    return models


@pytest.mark.parametrize("format", ["gptq", "modelopt NVFP4"])
def test_of_other_tools(format, any_saved):
    loaded, expected = foreign_and_dense(format, any_saved)
    experts = [m for m in loaded.modules() if isinstance(m, qcore.nn.QuantizedExperts)]
    assert experts
    torch.testing.assert_close(logits(loaded), logits(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("format", ["compressed-tensors W4A16", "MXFP4", "bitsandbytes NF4"])
def test_of_more_tools(format, saved):
    loaded, expected = foreign_and_dense(format, saved)
    torch.testing.assert_close(logits(loaded), logits(expected), rtol=1e-3, atol=1e-5)


def test_blocks_of_fp8(any_saved):
    loaded, expected = foreign_and_dense("fp8", any_saved)
    wanted = dict(expected.named_parameters())
    for name, module in loaded.named_modules():
        if isinstance(module, qcore.nn.QuantizedExperts):
            for part, layer in module.projections().items():
                assert torch.equal(layer.weight.dequantize(torch.float32), wanted[f"{name}.{part}"])
    # Activations are fp8, too.
    found, wide = logits(loaded), logits(expected)
    assert 0 < float((found - wide).norm() / wide.norm()) < 0.1


def test_gpt_oss(tmp_path):
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 96, "intermediate_size": 64}  # so that a transposed weight has another shape
    made = transformers.GptOssConfig(**sizes)
    model = Auto.from_config(made).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.1)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in [n for n in state if n.endswith((".gate_up_proj", ".down_proj"))]:
        weight = state.pop(name).transpose(1, 2)
        q = qcore.QTensor.stack([qcore.quantize(w.contiguous(), "fp4-g32-e8m0", "absmax") for w in weight])
        codes = q.codes()
        state[f"{name}_blocks"] = (codes[..., ::2] | (codes[..., 1::2] << 4)).unflatten(-1, (-1, 16)).contiguous()
        state[f"{name}_scales"] = q.scale.transpose(1, 2).contiguous()
        model.get_parameter(name).data = q.dequantize(torch.float32).transpose(1, 2).contiguous()
    settings = {"quantization_config": {"quant_method": "mxfp4"}, "architectures": ["GptOssForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**made.to_dict(), **settings}))
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = empty(model)
    qcore.load_(loaded, tmp_path)
    assert isinstance(loaded.model.layers[0].mlp.experts, qcore.nn.QuantizedExperts)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)


def test_experts_without_a_gate():
    """Nemotron's: the second product takes ``act_fn`` of the first."""
    module = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    made = transformers.NemotronHConfig(
        hidden_size=64, n_routed_experts=4, moe_intermediate_size=32, layers_block_type=["mamba", "moe"]
    )
    made._experts_implementation = "eager"
    torch.manual_seed(0)
    holder = torch.nn.Module()
    holder.experts = module.NemotronHExperts(made)
    for parameter in holder.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    given = torch.randn(5, 64), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    wanted = holder.experts(*given).detach()
    qcore.quantize_(holder, "w8a16")
    found = holder.experts(*given).detach()
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


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
    settings = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    for format in ("gptq", "fp8"):
        write_directory(folder / format, settings, state, layers, format)
        qcore.hf.adopt(format)
        loaded, other = Auto.from_pretrained(folder / format), empty(model)
        qcore.load_(other, folder / format)
        assert torch.equal(logits(loaded), logits(other))
