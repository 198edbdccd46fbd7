"""Valid files that differ from those which the tools write today: settings elsewhere, other names, other dtypes."""

import json
import os

import pytest
import torch
from foreign_layers import FrozenLayer, edited, frozen
from foreign_layers import load_layer as load
from torch import nn

import qcore
from qcore import CheckpointError
from qcore.checkpoint.importers.base import LayerRefused, group_size

FP8 = torch.float8_e4m3fn


def changed(case, change):
    """A frozen layer with another config.json; ``change`` gets what is in it."""
    layer = frozen(case)
    layer.metadata["config"] = json.dumps(change(layer.config))
    return layer


# Groups of columns.


@pytest.mark.parametrize(("k", "groups", "wanted", "size"), [
    (4096, 32, (), 128), (4096, 32, (64,), 128), (4096, 1, (-1,), None), (104, 4, (32,), 32), (104, 4, (64, 32), 32),
    (320, 3, (128,), 128), (96, 2, (48,), 48), (96, 3, (), 32), (5120, 40, (-1,), 128), (11008, 86, (), 128),
    (7168, 56, (64,), 128), (40, 1, (128,), None), (48, 1, (32,), 48),
    (4096, 1, (-1, 128), None), (4096, 1, (0, 128), None),
])  # fmt: skip
def test_a_group_size_that_fits(k, groups, wanted, size):
    assert group_size(k, groups, *wanted) == size


@pytest.mark.parametrize(("k", "groups", "wanted"), [
    (104, 4, ()), (104, 4, (64,)), (320, 3, ()), (192, 2, ()), (100, 7, (32,)), (8, 9, ()), (8, 0, ()),
])  # fmt: skip
def test_a_group_size_is_not_guessed(k, groups, wanted):
    with pytest.raises(LayerRefused, match="groups"):
        group_size(k, groups, *wanted)


# Settings.


@pytest.mark.parametrize("place", ["text_config", "language_config", "llm_config", "thinker_config.text_config"])
@pytest.mark.parametrize("top", [{}, {"quantization_config": {}}, {"quantization_config": None}])
def test_settings_of_a_part_of_the_model(place, top, tmp_path):
    def moved(config):
        for name in reversed(place.split(".")):
            config = {name: config}
        return config | top

    layer = changed("gptq_4_asym_v1_desc", moved)
    assert layer.is_dense(load(layer, tmp_path).weight.dequantize(torch.float32))


def test_settings_in_very_many_parts(tmp_path):
    config = {f"{i}_config": {f"{j}_config": {} for j in range(1000)} for i in range(100)}
    layer = changed("ct_fp8_dyn", lambda own: own | config)
    assert layer.is_dense(load(layer, tmp_path).weight.dequantize(torch.float32))


@pytest.mark.parametrize("case", ["gptq_4_sym_v1_g128", "awq_gemm_asym_g128"])
@pytest.mark.parametrize("strict", [True, False])
def test_codes_that_no_settings_name(case, strict, tmp_path):
    layer = changed(case, lambda config: {})
    with pytest.raises(CheckpointError, match=r"codes as GPTQ and AWQ store them.*\n.*quant_method"):
        qcore.load_(layer.model(), layer.write(tmp_path), strict=strict)


def test_float_parameters_of_these_names_are_floats(tmp_path):
    def model():
        return nn.ParameterDict({"qweight": nn.Parameter(torch.randn(4, 4)), "scales": nn.Parameter(torch.randn(4))})

    source, target = model(), model()
    qcore.save(source, tmp_path / "m.safetensors")
    qcore.load_(target, tmp_path / "m.safetensors")
    assert torch.equal(target["qweight"], source["qweight"])


@pytest.mark.parametrize("part", ["vision_config", "draft_config", "audio_config"])
def test_settings_of_another_part_are_not_those_of_text(part, tmp_path):
    other = {part: {"quantization_config": {"quant_method": "higgs"}}}
    layer = changed("gptq_4_asym_v1_desc", lambda config: {**other, "thinker_config": {"text_config": config}})
    assert layer.is_dense(load(layer, tmp_path).weight.dequantize(torch.float32))
    qcore.save(nn.Linear(4, 4), tmp_path / "float")
    (tmp_path / "float" / "config.json").write_text(json.dumps(other))
    qcore.load_(nn.Linear(4, 4), tmp_path / "float")


def test_mlx_is_named(tmp_path):
    tensors = {
        "model.fc.weight": torch.zeros(8, 8, dtype=torch.uint32),
        "model.fc.scales": torch.ones(8, 1),
        "model.fc.biases": torch.ones(8, 1),
    }
    layer = FrozenLayer("model.fc", tensors, {"config": '{"quantization": {"bits": 4}}', "shape": "8,64"}, None)
    with pytest.raises(CheckpointError, match="quantized by MLX"):
        qcore.load_(torch.nn.Linear(64, 8), layer.write(tmp_path))


def test_one_shard_instead_of_all(tmp_path):
    layer = frozen("ct_w4a16_g128")
    del layer.tensors[f"{layer.layer}.weight_scale"]
    layer.write(tmp_path)
    shard = (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"one of several files.*\n.*directory"):
        qcore.load_(layer.model(), shard)


# fp8.


def test_static_activations_as_transformers_names_them(tmp_path):
    torch.manual_seed(0)
    weight = torch.randn(8, 64).to(FP8)
    tensors = {
        "model.fc.weight": weight,
        "model.fc.weight_scale_inv": torch.tensor(0.25),
        "model.fc.activation_scale": torch.tensor(0.5, dtype=torch.bfloat16),
    }
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    layer = FrozenLayer("model.fc", tensors, {"config": json.dumps(config), "shape": "8,64"}, weight[:2].float() * 0.25)
    module = load(layer, tmp_path)
    assert module.scheme == qcore.Scheme.parse("wfp8afp8-static(0.5)")
    assert torch.equal(module.weight.dequantize(torch.float32), weight.float() * 0.25)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_blocks_of_no_rows(tmp_path):
    tensors = {"model.fc.weight": torch.zeros(0, 64).to(FP8), "model.fc.weight_scale_inv": torch.ones(0, 1)}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    layer = FrozenLayer("model.fc", tensors, {"config": json.dumps(config), "shape": "0,64"}, torch.zeros(0, 64))
    assert load(layer, tmp_path).weight.shape == (0, 64)


@pytest.mark.parametrize("name", ["scale", "qscale_weight", "weight.scale", "weight_quantizer.scale", "weight_scale_2"])
def test_codes_beside_a_scale_of_any_name_are_no_weights(name, tmp_path):
    qcore.save({"fc.weight": torch.randn(8, 64).to(FP8), f"fc.{name}": torch.ones(())}, tmp_path / "m.safetensors")
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(64, 8, bias=False)})
    with pytest.raises(CheckpointError, match="no settings say how"):
        qcore.load_(model, tmp_path / "m.safetensors", strict=False)


# compressed-tensors.


def test_scales_that_are_powers_of_two_as_their_own_dtype(tmp_path):
    layer = frozen("ct_mxfp4a16")
    name = f"{layer.layer}.weight_scale"
    layer.tensors[name] = layer.tensors[name].view(torch.float8_e8m0fnu)
    assert layer.is_dense(load(layer, tmp_path).weight.dequantize(torch.float32))


def test_blocks_as_a_text(tmp_path):
    def as_text(settings):
        for group in settings["config_groups"].values():
            group["weights"]["block_structure"] = "x".join(map(str, group["weights"]["block_structure"]))

    layer = edited("ct_fp8_block", as_text)
    assert layer.is_dense(load(layer, tmp_path).weight.dequantize(torch.float32))


@pytest.mark.parametrize("case", ["ct_w8a8_dyn", "ct_fp8_dyn", "ct_w4a16_g128"])
def test_an_input_scale_that_no_setting_uses(case, tmp_path):
    layer = frozen(case)
    layer.tensors[f"{layer.layer}.input_scale"] = torch.ones(1)
    assert layer.is_dense(load(layer, tmp_path).weight.dequantize(torch.float32))


# GGUF.


def test_a_pipe_with_the_name_of_a_file(tmp_path):
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="neither"):
        qcore.load_(torch.nn.Linear(2, 2), tmp_path)


# A layer that is the whole model: its tensors have no prefix.


@pytest.mark.parametrize("case", [
    "gptq_4_asym_v1_desc", "awq_gemm_asym_g128", "ct_w4a16_g128", "ct_w8a16", "ct_nvfp4a16", "fp8_block_ragged",
    "hqq_4_axis1", "modelopt_nvfp4",
])  # fmt: skip
def test_a_layer_without_a_name(case, tmp_path):
    layer = frozen(case)
    tensors = {name.removeprefix(f"{layer.layer}."): tensor for name, tensor in layer.tensors.items()}
    n, k = layer.shape
    model = nn.Linear(k, n, bias="bias" in tensors)
    qcore.load_(model, FrozenLayer("", tensors, layer.metadata, layer.rows).write(tmp_path))
    assert layer.is_dense(model.weight.detach())
