"""vLLM generates the tokens that transformers does, in float32, from every kind of checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from models import SCHEME
from serving import tokens

import qcore

QCORE = {"quantization": "qcore"}


def at_load(scheme, **settings):
    """The options that quantize float weights."""
    return {**QCORE, "hf_overrides": {"quantization_config": {"quant_method": "qcore", "scheme": scheme, **settings}}}


def model_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def layer(llm, name):
    return model_of(llm).get_submodule(name)


@pytest.mark.parametrize(
    "name",
    ["biases", "tied", "partly", "mixed", "w8a8", "gpt2", "mxfp4", "gptq", "awq", "compressed-tensors", "act-order",
     "static", "experts", "experts-excluded", "experts-with-embedding"],
)  # fmt: skip
def test_stored(name, made, engine):
    folder, expected = made(name)
    assert tokens(engine(folder, **QCORE)) == expected


def test_settings_of_a_folder_that_qcore_wrote_need_no_option(made, engine):
    folder, expected = made("experts-streamed")
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "qcore"
    assert tokens(engine(folder)) == expected


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("float", at_load(SCHEME)),
        ("float-tied", at_load(SCHEME, exclude=["lm_head", "*.v_proj"])),
        ("experts-float", at_load("w4a16-g32@absmax", exclude=["embed_tokens", "*.gate"])),
    ],
)
def test_quantized_at_load(name, options, made, engine):
    folder, expected = made(name)
    assert tokens(engine(folder, **options)) == expected


def test_parts_of_a_fused_layer_that_differ_stay_apart(made, engine):
    llm = engine(made("mixed")[0], **QCORE)
    fused = layer(llm, "model.layers.0.self_attn.qkv_proj").qcore
    assert [str(part.scheme.weight) for part in fused.parts] == ["int8/plain", "int4-g32-asym/plain", "int4-g32/plain"]
    assert len(layer(llm, "model.layers.0.mlp.gate_up_proj").qcore.parts) == 1


def test_experts_of_gpt_oss_run_quantized(made, engine):
    folder, expected = made("gpt-oss")
    llm = engine(folder, **QCORE)
    assert tokens(llm) == expected
    assert sum(row.kind == "QuantizedGroupedLinear" for row in qcore.report(model_of(llm))) == 4


def test_a_tied_weight_is_in_memory_once(made, engine):
    llm = engine(made("tied")[0], **QCORE)
    report = {row.name: row for row in qcore.report(model_of(llm))}
    assert report["lm_head.qcore"].tied_to == "model.embed_tokens.qcore"


def test_a_float_layer_is_vllms_own(made, engine):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    llm = engine(made("partly")[0], **QCORE)
    down = layer(llm, "model.layers.1.mlp.down_proj")
    assert isinstance(down.quant_method, UnquantizedLinearMethod)
    assert not hasattr(down, "qcore")


def test_the_log_says_which_kernel_runs_which_layer(made, engine, log):
    engine(made("biases")[0], **QCORE)
    lines = [line for text in log for line in text.splitlines() if "self_attn.qkv_proj" in line]
    assert len(lines) == 1
    assert "3 x model.layers.*.self_attn.qkv_proj" in lines[0]
    assert "w4a16-g32-asym" in lines[0]


def test_weights_are_processed_once(made, engine):
    llm = engine(made("biases")[0], **QCORE)
    down = layer(llm, "model.layers.0.mlp.down_proj")
    before = down.qcore
    down.quant_method.process_weights_after_loading(down)
    assert down.qcore is before
    assert not down.weight.numel()
    assert down.weight.dtype == torch.float32


def test_the_weight_by_itself_has_no_bias(made, engine):
    llm = engine(made("biases")[0], **QCORE)
    down = layer(llm, "model.layers.0.mlp.down_proj")
    x = torch.eye(320)
    with torch.inference_mode():
        dense = down.quant_method.apply(down, x, None)
        biased = down.quant_method.apply(down, x, down.bias)
    expected = torch.cat([part.weight.dequantize(torch.float32) for part in down.qcore.parts])
    torch.testing.assert_close(dense, expected.t(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(biased, dense + down.bias, atol=1e-5, rtol=1e-5)


# What is refused.


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scheme": "w5a16"}, "w5a16"),
        ({"scheme": "w4a16-g32@gptq"}, "needs calibration data"),
        ({"scheme": "w8a8-static"}, "needs calibration data"),
        ({"scheme": "w4a16", "excluded": []}, "has no setting 'excluded'"),
    ],
)
def test_settings_that_are_wrong(settings, text, made, engine):
    with pytest.raises(Exception, match=text):
        engine(made("float")[0], **at_load(**settings))


def test_strict_refuses_the_fallback(made, engine):
    with (
        qcore.using(disable=("cpu",)),
        pytest.raises(qcore.UnsupportedError, match=r"(?s)vLLM's layer 'embed_tokens'.*only the fallback"),
    ):
        engine(made("float")[0], **at_load("w4a16-g32", strict=True))


def test_experts_of_different_formats_are_named(made, engine):
    scheme = {"*.experts.1.w1": "w8a16", "*": "w4a16-g32@absmax"}
    with pytest.raises(qcore.UnsupportedError, match=r"(?s)expert 1 of .*experts\.w13.*experts\.1\.w1: w8a16"):
        engine(made("experts-float")[0], **at_load(scheme, exclude=["embed_tokens", "*.gate"]))


def test_strict_names_weights_that_vllm_takes_as_floats(made, engine):
    overrides = {"quantization_config": {"quant_method": "qcore", "strict": True}}
    options = {**QCORE, "hf_overrides": overrides}
    with pytest.raises(qcore.UnsupportedError, match="embed_tokens"):
        engine(made("embedding-of-experts")[0], **options)
