"""optimum-quanto 0.2.7: qint2, both float8, activations, and descriptions that do not fit."""

import contextlib
import json
import math
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from foreign_layers import FrozenLayer, frozen
from foreign_layers import load_layer as read
from hypothesis import given, settings
from hypothesis import strategies as st

import qcore
from qcore.checkpoint.importers.configured_shapes import shapes_by_name


def with_qmap(case, change):
    """The layer with another description. ``change``: made of the layer's own."""
    layer = frozen(case)
    qmap = json.loads(layer.metadata["quanto_qmap"])
    layer.metadata["quanto_qmap"] = json.dumps({layer.layer: change(qmap[layer.layer])})
    return layer


@pytest.mark.parametrize(("case", "scheme"), [("quanto_qfloat8", "wfp8a16"), ("quanto_qfloat8_e5m2", "wfp8_e5m2a16")])
def test_float8_dequantizes_to_what_the_tool_computes(case, scheme, tmp_path):
    layer = frozen(case)
    module = read(layer, tmp_path)
    assert module.scheme == qcore.Scheme.parse(scheme)
    assert layer.is_dense(module.weight.dequantize(torch.float32))


def test_qint2_is_the_tool_s_to_one_unit_in_the_last_place(tmp_path):
    layer = frozen("quanto_qint2")
    weight = read(layer, tmp_path).weight
    assert weight.format == qcore.Format.parse("int4-g128-fzp")
    codes = weight.codes()
    assert (int(codes.min()), int(codes.max())) == (-2, 1)
    found = weight.dequantize(torch.float32)
    assert float((found[:2] - layer.rows).abs().max()) <= 2**-23 * float(found.abs().max())


def test_activations_are_left_float_with_a_warning(tmp_path):
    layer = with_qmap("quanto_qint8", lambda told: told | {"activations": "qint8"})
    with pytest.warns(qcore.QcoreWarning, match="its 'qint8' activations and results stay float"):
        module = read(layer, tmp_path)
    assert module.scheme == qcore.Scheme.parse("w8a16")
    assert layer.is_dense(module.weight.dequantize(torch.float32))


@pytest.mark.parametrize("settings", [{}, {"activations": None}])
def test_weights_without_activations_give_no_warning(settings, tmp_path):
    layer = frozen("quanto_qint8")
    config = layer.config
    config["quantization_config"] |= settings
    layer.metadata["config"] = json.dumps(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(layer, tmp_path)


def test_other_elements_are_refused(tmp_path):
    layer = with_qmap("quanto_qint2", lambda told: told | {"weights": "qint3"})
    with pytest.raises(qcore.CheckpointError, match="its weights are 'qint3'"):
        read(layer, tmp_path)


def test_a_weight_whose_shape_nothing_tells_is_refused(tmp_path):
    layer = frozen("quanto_qint2")
    layer.metadata["config"] = json.dumps({"quantization_config": {"quant_method": "quanto"}})
    with pytest.raises(qcore.CheckpointError, match="contains the shape"):
        read(layer, tmp_path)


@pytest.mark.parametrize("name", ["W_pack", "query_key_value", "gate", "score", "kv_a_proj_with_mqa"])
def test_layers_without_bias_take_hidden_states(tmp_path, name):
    layer = frozen("quanto_qint4")
    del layer.tensors[f"{layer.layer}.bias"]
    layer.tensors = {old.replace("q_proj", name): tensor for old, tensor in layer.tensors.items()}
    layer.metadata = {key: text.replace("q_proj", name) for key, text in layer.metadata.items()}
    config = {key: layer.config[key] for key in ("hidden_size", "quantization_config")}  # contains no N
    layer.metadata["config"] = json.dumps(config)
    expected = read(frozen("quanto_qint4"), tmp_path / "whole").weight
    module = read(FrozenLayer(layer.layer.replace("q_proj", name), layer.tensors, layer.metadata, layer.rows), tmp_path)
    assert torch.equal(module.weight.dequantize(torch.float32), expected.dequantize(torch.float32))


@pytest.mark.parametrize(("layer", "shape", "config"), [
    ("model.layers.0.mlp.experts.0.down_proj", (256, 128), {}),
    ("model.layers.0.mlp.experts.0.up_proj", (128, 256), {}),
    ("model.layers.0.mlp.down_proj", (256, 1024), {}),
    ("model.layers.0.mlp.shared_expert.down_proj", (256, 512), {}),
    ("model.layers.0.mlp.shared_experts.gate_proj", (384, 256), {}),
    ("model.layers.0.self_attn.o_proj", (256, 512), {}),
    ("model.layers.0.self_attn.o_proj", (256, 320), {"v_head_dim": 40}),
    ("model.layers.0.self_attn.k_proj", (128, 256), {}),
    ("model.layers.0.self_attn.q_proj", (384, 256), {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16}),
    ("model.layers.0.self_attn.kv_b_proj", (512, 64), {"qk_nope_head_dim": 24, "v_head_dim": 40}),
    ("transformer.h.0.self_attention.query_key_value", (640, 256), {"num_key_value_heads": None, "multi_query": True}),
    ("transformer.encoder.layers.0.mlp.dense_h_to_4h", (2048, 256), {}),
    ("model.layers.0.self_attn.q_proj", (1024, 256), {}),
    ("model.layers.0.self_attn.k_proj", (192, 256), {"num_key_value_heads": None}),
    ("lm_head", (1088, 256), {"vocab_size": 1000}),
    ("model.language_model.layers.0.mlp.up_proj", (320, 128), {"text_config": {"hidden_size": 128}}),
    ("model.vit.blocks.0.attn.q_proj", None, {"hidden_size": 4096}),
    ("model.layers.0.mlp.down_proj", None, {"intermediate_size": 512}),
    ("model.layers.0.mlp.experts.0.down_proj", None, {"moe_intermediate_size": 64}),
    ("vision.blocks.0.attn.q_proj", None, {}),
])  # fmt: skip
def test_shapes_of_layers_of_one_name(layer, shape, config):
    sizes = {
        "hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 128, "num_attention_heads": 8,
        "shared_expert_intermediate_size": 512, "n_shared_experts": 3, "num_key_value_heads": 2, "head_dim": 64,
        "kv_lora_rank": 64,
    }  # fmt: skip
    count = 256 * 1024 if shape is None else math.prod(shape)
    assert shapes_by_name(sizes | config, layer, count) == (set() if shape is None else {shape})


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
CONFIGS = st.dictionaries(
    st.sampled_from(("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")), VALUES
)


@given(told=VALUES | st.dictionaries(st.sampled_from(("weights", "activations")), VALUES), config=CONFIGS)
@settings(max_examples=60, deadline=None)
def test_any_description(told, config):
    layer = with_qmap("quanto_qint2", lambda _: told)
    layer.metadata["config"] = json.dumps(layer.config | config)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", qcore.QcoreWarning)
        with contextlib.suppress(qcore.CheckpointError):
            read(layer, Path(folder))
