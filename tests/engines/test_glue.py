"""qcore-vllm serves a model over a stand-in for the engine: logits of any number of ranks are those of torch."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import engine_models
import pytest
import torch
import vllm_stand_in
from engine_models import VOCABULARY, logits, saved

import qcore
from qcore.plugin_api import open_checkpoint

SCHEME = "w4a16-g32-asym@minmax"
IDS = torch.tensor([[1, 5, 9, 63, 64, 99]])
CASES = {
    "every layer": {"scheme": SCHEME},
    "tied": {"scheme": "w4a16-g32@absmax", "tied": True},
    "parts that differ": {"scheme": {"*.q_proj": "w8a16", "*.v_proj": "w4a16-g32@absmax", "*": SCHEME}},
    "partly float": {"scheme": SCHEME, "exclude": ["embed_tokens", "lm_head", "*.v_proj", "*.1.mlp.*"]},
    "nf4": {"scheme": "nf4", "exclude": ["embed_tokens"]},
    "mxfp4": {"scheme": "mxfp4", "exclude": ["embed_tokens", "lm_head"]},
    "fp8": {"scheme": "wfp8a16", "exclude": ["embed_tokens", "lm_head"]},
    "experts": {"scheme": "w8a16", "moe": "w4a16-g32@absmax", "exclude": ["*.gate"]},
    "experts in nf4": {"scheme": "w8a16", "moe": "nf4", "exclude": ["*.gate"]},
}


def quantized(folder, scheme, moe="", tied=False, **settings):
    """A checkpoint, and the logits of the model that it holds."""
    model = engine_models.model(moe, tied)
    qcore.quantize_(model, scheme, **settings)
    saved(model, folder)
    return model(IDS)


def same(found, expected):
    return torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_torch(name, ranks, serve, tmp_path):
    case = CASES[name]
    expected = quantized(tmp_path / "model", **case)
    shape = {"moe": bool(case.get("moe")), "tied": case.get("tied", False)}
    same(logits(serve(tmp_path / "model", ranks, **shape), IDS), expected)


def test_experts_of_a_rank_are_whole(serve, tmp_path):
    expected = quantized(tmp_path / "model", "w8a16", moe="w4a16-g32@absmax", exclude=["*.gate"])
    ranks = serve(tmp_path / "model", 2, moe=True, by_expert=True)
    assert [rank.model.layers[0].mlp.experts.qcore.num_experts for rank in ranks] == [2, 2]
    same(logits(ranks, IDS), expected)


def test_experts_stay_float(serve, tmp_path):
    """Float experts of a quantized checkpoint go back to the engine's own method."""
    model = engine_models.model("w8a16")
    dense = {
        f"model.layers.{i}.mlp.experts.{e}.{name}.weight": rows
        for i, layer in enumerate(model.model.layers)
        for e in range(engine_models.EXPERTS)
        for name, rows in zip(("w1", "w3", "w2"), _of_expert(layer.mlp.experts, e), strict=True)
    }
    expected = model(IDS)
    from safetensors.torch import save_file

    state = {name: t.contiguous() for name, t in model.state_dict().items() if ".experts." not in name}
    (tmp_path / "float").mkdir()
    save_file(
        {**state, **{name: t.contiguous() for name, t in dense.items()}}, tmp_path / "float" / "model.safetensors"
    )
    ranks = serve(tmp_path / "float", 2, moe=True)
    assert type(ranks[0].model.layers[0].mlp.experts.quant_method) is vllm_stand_in.UnquantizedFusedMoEMethod
    same(logits(ranks, IDS), expected)


def _of_expert(experts, e):
    up, down = (
        experts.projections()[name].weight[e].dequantize(torch.float32) for name in ("gate_up_proj", "down_proj")
    )
    return (*up.chunk(2), down)


@pytest.mark.parametrize("ranks", [1, 2])
def test_float_weights_are_quantized_at_load(ranks, serve, tmp_path):
    model = engine_models.model()
    from safetensors.torch import save_file

    (tmp_path / "float").mkdir()
    save_file(model.state_dict(), tmp_path / "float" / "model.safetensors")
    qcore.quantize_(model, SCHEME, exclude=["lm_head", "*.k_proj"])
    settings = {"scheme": SCHEME, "exclude": ["lm_head", "*.k_proj"]}
    found = serve(tmp_path / "float", ranks, settings)
    assert [len(rank.model.layers[0].self_attn.qkv_proj.qcore.parts) for rank in found] == [3] * ranks
    same(logits(found, IDS), model(IDS))


@pytest.mark.parametrize("to", ["gptq", "awq", "compressed-tensors"])
def test_checkpoints_of_other_tools(to, serve, tmp_path):
    model = engine_models.model()
    qcore.quantize_(model, SCHEME, exclude=["embed_tokens", "lm_head", "*.self_attn.*", "*.down_proj"])
    saved(model, tmp_path / "own")
    qcore.convert(tmp_path / "own", tmp_path / "other", to=to, dtype=torch.float16)
    again = engine_models.model(seed=1)
    qcore.load_(again, tmp_path / "other")
    found = serve(tmp_path / "other", 2)
    assert found[0].model.layers[0].mlp.gate_up_proj.qcore.parts[0].scheme.weight.group_size == 32
    same(logits(found, IDS), again(IDS).float())


def test_an_order_is_served_on_one_rank_only(serve, tmp_path):
    model = engine_models.model()
    qcore.quantize_(model, SCHEME, exclude=["embed_tokens", "lm_head"])
    for layer in model.modules():
        if isinstance(layer, qcore.nn.QuantizedLinear):
            layer.weight = layer.weight.derived(order=torch.randperm(layer.in_features, dtype=torch.int32))
    saved(model, tmp_path / "model")
    same(logits(serve(tmp_path / "model"), IDS), model(IDS))
    with pytest.raises(qcore.UnsupportedError, match=r"_proj: its columns are sorted by group \(act-order\)"):
        serve(tmp_path / "model", 2)


def test_a_tied_table_is_in_memory_once(serve, tmp_path):
    quantized(tmp_path / "model", "w4a16-g32@absmax", tied=True)
    (rank,) = serve(tmp_path / "model", tied=True)
    assert qcore.report(rank)["lm_head.qcore"].tied_to == "model.embed_tokens.qcore"


@pytest.mark.parametrize("scheme", ["w4a16-g32@absmax", "w8a16"])
@pytest.mark.parametrize("ties", [True, False])
def test_a_head_that_a_model_ties_is_not_loaded(glue, tmp_path, scheme, ties):
    """Gemma 2 has no head to load it into."""
    from qcore_vllm.stream import stream

    quantized(tmp_path / "model", scheme, tied=True)
    config = vllm_stand_in.METHODS["qcore"].from_config({"quant_method": "qcore"})
    model = torch.nn.Module()
    model.config = SimpleNamespace(tie_word_embeddings=ties)
    with open_checkpoint(tmp_path / "model") as archive:
        names = {name for name, _ in stream(archive, model, torch.float32, config)}
    assert "model.embed_tokens.weight" in names
    assert ("lm_head.weight" in names) is not ties


def test_the_first_rank_logs_each_kernel(serve, tmp_path, caplog):
    quantized(tmp_path / "model", SCHEME)
    with caplog.at_level(logging.INFO, "vllm.qcore"):
        serve(tmp_path / "model", 2)
    assert caplog.text.count("qcore serves this model") == 1
    lines = [line for line in caplog.text.splitlines() if "self_attn.qkv_proj" in line]
    assert [line.split()[:3] for line in lines] == [
        [f"model.layers.{i}.self_attn.qkv_proj", "QuantizedLinear", "quantized"] for i in range(2)
    ]
    assert "torch.plain.linear" in lines[0]


def test_weights_are_processed_once(serve, tmp_path):
    quantized(tmp_path / "model", SCHEME)
    (rank,) = serve(tmp_path / "model")
    for layer in (rank.model.layers[0].mlp.down_proj, rank.model.embed_tokens, rank.lm_head):
        before = layer.qcore
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.qcore is before
        assert not layer.weight.numel()


def test_the_weight_by_itself_has_no_bias(serve, tmp_path):
    quantized(tmp_path / "model", SCHEME)
    down = serve(tmp_path / "model")[0].model.layers[0].mlp.down_proj
    dense = down.qcore.parts[0].weight.dequantize(torch.float32)
    same(down.quant_method.apply(down, torch.eye(dense.shape[1]), None), dense.t())


def test_strict_refuses_the_fallback(serve, tmp_path):
    quantized(tmp_path / "model", SCHEME)
    with pytest.raises(qcore.UnsupportedError, match=r"vLLM's layer 'model.embed_tokens':\nstrict: .*the fallback"):
        serve(tmp_path / "model", settings={"strict": True})


def test_padding_of_a_vocabulary_is_zero(serve, tmp_path):
    quantized(tmp_path / "model", SCHEME)
    ranks = serve(tmp_path / "model", 2)
    y = ranks[1].lm_head(torch.randn(3, engine_models.D))
    assert y.shape == (3, 64)
    assert not y[:, VOCABULARY - 64 :].any()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scheme": "w5a16"}, "w5a16"),
        ({"scheme": "w4a16-g32@gptq"}, "needs calibration data"),
        ({"scheme": "w8a8-static"}, "needs calibration data"),
        ({"scheme": "w8a8-o8(0.1,0)"}, "int8 codes"),
        ({"excluded": []}, "has no setting 'excluded'"),
    ],
)
def test_settings_that_are_wrong(settings, text, glue):
    with pytest.raises(qcore.FormatError, match=text):
        glue["config"].QcoreConfig.from_config({"quant_method": "qcore", **settings})


def test_settings_of_other_tools_are_not_read(glue):
    config = glue["config"].QcoreConfig.from_config({"quant_method": "gptq", "bits": 4})
    assert config.selection is None
    assert config.override_quantization_method({"quant_method": "gptq"}, "qcore") == "qcore"
    assert config.override_quantization_method({"quant_method": "gptq"}, None) is None


def test_experts_of_different_formats_are_named(serve, tmp_path):
    from safetensors.torch import save_file

    model = engine_models.model("w8a16")
    state = {name: t for name, t in model.state_dict().items() if ".experts." not in name}
    for i in range(2):
        for e in range(engine_models.EXPERTS):
            for name, shape in (("w1", (144, 96)), ("w3", (144, 96)), ("w2", (96, 144))):
                state[f"model.layers.{i}.mlp.experts.{e}.{name}.weight"] = torch.randn(shape)
    (tmp_path / "float").mkdir()
    save_file({name: t.contiguous() for name, t in state.items()}, tmp_path / "float" / "model.safetensors")
    scheme = {"*.experts.1.w1": "w8a16", "*": "w4a16-g32@absmax"}
    with pytest.raises(qcore.UnsupportedError, match=r"(?s)expert 1 of .*experts\.w13.*experts\.1\.w1: w8a16"):
        serve(tmp_path / "float", settings={"scheme": scheme, "exclude": ["embed_tokens", "*.gate"]}, moe=True)
