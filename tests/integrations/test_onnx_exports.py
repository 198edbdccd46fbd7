"""Whole models to ONNX: onnxruntime computes what the quantized model in qcore computes."""

import numpy as np
import pytest
import torch
from model_zoo import loaded, logits, quantized, saved, tiny

import qcore

transformers = pytest.importorskip("transformers")
onnxruntime = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from qcore.checkpoint.exporters import onnx as onnx_export  # noqa: E402
from qcore.checkpoint.exporters.onnx_layers import replace_layers  # noqa: E402
from qcore.checkpoint.exporters.onnx_model import Traced  # noqa: E402

pytestmark = pytest.mark.alternate  # each takes up to half a minute


def session(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # By default it rounds x to int8 where it joins DequantizeLinear and MatMul.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def generated(running, ids, past):
    """Logits of ``ids`` ``(B, S)`` after ``past``: the results of an earlier call, or nothing."""
    shapes = {one.name: one.shape for one in running.get_inputs()}
    batch, now = ids.shape
    feeds = {"input_ids": ids}
    for name in shapes:
        if name.startswith("past_key_values"):
            empty = np.zeros((batch, shapes[name][1], 0, shapes[name][3]), np.float32)
            feeds[name] = past.get(name.replace("past_key_values", "present"), empty)
    before = next(value.shape[2] for name, value in feeds.items() if name != "input_ids")
    feeds["attention_mask"] = np.ones((batch, before + now), np.int64)
    if "position_ids" in shapes:
        feeds["position_ids"] = np.tile(np.arange(before, before + now), (batch, 1))
    return dict(zip([one.name for one in running.get_outputs()], running.run(None, feeds), strict=True))


def converted(folder, to="onnx"):
    qcore.convert(folder, folder.parent / "model.onnx", to)
    return session(folder.parent / "model.onnx")


def assert_same_logits(running, model, rtol=1e-4):
    """In one call, and the second half after the first from its keys and values."""
    wanted = logits(model).numpy()
    ids = (torch.arange(40).view(2, 20) % 96).numpy()
    whole = generated(running, ids, {})["logits"]
    half = generated(running, ids[:, :12], {})
    rest = generated(running, ids[:, 12:], half)["logits"]
    for found, part in ((whole, wanted), (half["logits"], wanted[:, :12]), (rest, wanted[:, 12:])):
        np.testing.assert_allclose(found, part, rtol=rtol, atol=rtol * abs(wanted).max())


def operators(path):
    graph = onnx.load(path, load_external_data=False).graph
    return {node.op_type for node in graph.node}, {node.domain for node in graph.node}


MODELS = ("llama-tied", "qwen3", "phi3", "gemma3")


@pytest.mark.parametrize("name", MODELS)
def test_models_run(name, tmp_path):
    model = quantized(name, tmp_path / "own", "w4a16-g32-asym")
    assert_same_logits(converted(tmp_path / "own"), model)
    assert "MatMulNBits" in operators(tmp_path / "model.onnx")[0]


LAYERS = [
    f"layers.{layer}.{name}_proj"
    for layer in range(2)
    for name in (*(f"self_attn.{part}" for part in "qkvo"), *(f"mlp.{part}" for part in ("gate", "up", "down")))
]
FLOAT = (
    "w4a16-g32", "w4a16-g64-asym", "w4a16", "w8a16", "w8a16-g16-asym", "w4a16-g32-fzp", "w4a16-g24", "wfp8a16",
    "wfp4a16-g32-e8m0", "wfp4a16-g16-e4m3d", "wnf4a16-g64", "wnf4a16-g24",
)  # fmt: skip
ROUNDED = ("w8a8", "w8a8-asym", "w4a8-g32", "wfp8afp8", "wfp8afp8-g128")


def mixed(schemes, table):
    """One scheme for each layer, the last one for those that are left; ``table``: of the embedding and head."""
    assert len(schemes) <= len(LAYERS)
    return {"embed_tokens": table, "lm_head": table, **dict(zip(LAYERS, schemes, strict=False)), "*": schemes[-1]}


@pytest.mark.parametrize("to", ["onnx", "onnx-qdq"])
@pytest.mark.parametrize("table", ["w4a16-g32-fzp", "wnf4a16-g32"])
def test_weights_stand_for_the_same_numbers(table, to, tmp_path):
    model = quantized("llama-tied", tmp_path / "own", mixed(FLOAT, table), hidden_size=192)
    assert_same_logits(converted(tmp_path / "own", to), model)
    found, domains = operators(tmp_path / "model.onnx")
    if to == "onnx-qdq":
        assert domains == {""}
        assert "DequantizeLinear" in found
    else:
        assert {"MatMulNBits", "MatMulBnb4", "DequantizeLinear"} <= found
        assert ("GatherBlockQuantized" in found) == table.startswith("w4")


def test_activations_are_rounded_alike(tmp_path):
    """Codes of x beside a tie may differ, so results are near."""
    model = quantized("llama", tmp_path / "own", mixed(ROUNDED, "w8a16"))
    assert_same_logits(converted(tmp_path / "own"), model, rtol=2e-2)
    assert "MatMulInteger" in operators(tmp_path / "model.onnx")[0]


def test_static_activations(tmp_path):
    model = tiny("llama").half()
    batch = torch.arange(40).view(2, 20) % 96
    qcore.quantize_(model, "w8a8-static", exclude=["lm_head", "embed_tokens"], calibration=[batch])
    model = loaded(model, saved(model, tmp_path / "own"))
    assert_same_logits(converted(tmp_path / "own"), model, rtol=2e-2)
    assert {"QuantizeLinear", "DequantizeLinear"} <= operators(tmp_path / "model.onnx")[0]


def assert_outputs(folder, model, **inputs):
    """The tensors of the model's output by name."""
    running = converted(folder)
    feeds = {one.name: inputs[one.name].numpy() for one in running.get_inputs()}
    found = dict(zip([one.name for one in running.get_outputs()], running.run(None, feeds), strict=True))
    with torch.no_grad():
        wanted = model(**inputs)
    assert found.keys() == {name for name, value in wanted.items() if isinstance(value, torch.Tensor)}
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name].numpy(), rtol=1e-4, atol=1e-4 * wanted[name].abs().max())


def stored(model, scheme, folder, **more):
    """The quantized model as it is read back, in float32."""
    qcore.quantize_(model, scheme, **more)
    model.config.architectures = [type(model).__name__]
    saved(model, folder)
    found = type(model)(model.config).eval()
    qcore.load_(found, folder)
    return found


def test_encoder(tmp_path):
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    torch.manual_seed(3)
    model = stored(transformers.BertModel(config).eval(), "w8a16", tmp_path / "own")
    ids = torch.arange(21).view(3, 7)
    mask = (torch.arange(7) < torch.tensor([[7], [5], [2]])).long()
    assert_outputs(tmp_path / "own", model, input_ids=ids, attention_mask=mask, token_type_ids=ids % 2)


@pytest.mark.parametrize("scheme", ["w4a16-g24-asym", "w8a8"])
def test_convolutions(scheme, tmp_path):
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 24], depths=[1, 2], layer_type="basic", num_labels=5, image_size=32
    )
    torch.manual_seed(3)
    model = stored(transformers.ResNetForImageClassification(config).eval(), scheme, tmp_path / "own")
    assert_outputs(tmp_path / "own", model, pixel_values=torch.randn(3, 3, 32, 32))


def test_directory(tmp_path):
    model = quantized("llama", tmp_path / "own")
    (tmp_path / "own" / "tokenizer.json").write_text("{}")
    for _ in range(2):
        done = qcore.convert(tmp_path / "own", tmp_path / "out", "onnx", overwrite=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json", "model.onnx", "model.onnx.data", "tokenizer.json",
    ]  # fmt: skip
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    assert done.bytes_after == sum(p.stat().st_size for p in (tmp_path / "out").glob("model.onnx*"))
    assert_same_logits(session(tmp_path / "out" / "model.onnx"), model)
    assert {p.name for p in tmp_path.iterdir()} == {"own", "out"}


def test_a_gguf_file_is_a_source(tmp_path):
    pytest.importorskip("gguf")
    model = quantized("llama", tmp_path / "own")
    with pytest.warns(UserWarning, match="no vocabulary"):
        qcore.convert(tmp_path / "own", tmp_path / "own.gguf", "gguf")
    qcore.convert(tmp_path / "own.gguf", tmp_path / "model.onnx", "onnx")
    assert_same_logits(session(tmp_path / "model.onnx"), model)


class Layers(torch.nn.Module):
    """Calls each layer with its own x."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, *xs):
        return [layer(x) for layer, x in zip(self.layers, xs, strict=True)]


def assert_layers(shapes_and_schemes, *, standard, change=lambda layer: None):
    """Linear layers ``((N, K), scheme)`` in one graph give what their dequantized weights give in float64."""
    torch.manual_seed(0)
    holder = Layers(torch.nn.Linear(k, n) for (n, k), _ in shapes_and_schemes)
    for layer in holder.layers:
        change(layer)
    qcore.quantize_(holder, {f"layers.{i}": scheme for i, (_, scheme) in enumerate(shapes_and_schemes)})
    xs = [torch.randn(2, 3, k) for (_, k), _ in shapes_and_schemes]
    pairs = zip(holder.layers, xs, strict=True)
    wanted = [x.double() @ layer.weight.dequantize(torch.float64).t() + layer.bias.double() for layer, x in pairs]
    packed, refused = replace_layers(holder, standard=standard)
    assert not refused
    names = [[f"{letter}{i}" for i in range(len(xs))] for letter in "xy"]
    program = onnx_export._exported(Traced(holder, tuple(xs), (({0: "batch"},) * len(xs),), *names), None)
    onnx_export._set_int4(program, packed)
    running = session(program.model_proto.SerializeToString())
    found = running.run(None, {one.name: x.numpy() for one, x in zip(running.get_inputs(), xs, strict=True)})
    for part, whole in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            part, whole.detach().numpy(), rtol=1e-4, atol=1e-4 * float(whole.detach().abs().max())
        )


def test_large_groups_of_tables():
    """MatMulBnb4 has blocks of at most 256, bitsandbytes of up to 4096."""
    schemes = ("wnf4a16-g512", "wnf4a16", "wfp4_bnba16-g2048", "wfp4_bnba16", "wnf4a16-g48", "wnf4a16-g4096")
    shapes = ((3, 1024), (5, 512), (2, 4096), (4, 96), (3, 96), (2, 48))
    assert_layers(list(zip(shapes, schemes, strict=True)), standard=False)


def test_equal_bytes_of_different_shapes():
    """The exporter joins equal initializers, here all zeros, although their int4 codes have other shapes."""
    layers = [
        ((n, k), scheme) for n, k in ((8, 16), (16, 8), (1, 128), (4, 24)) for scheme in ("w4a16-g4-asym", "w4a16")
    ]
    assert_layers(layers, standard=True, change=lambda layer: layer.weight.data.zero_())


class TestRefusals:
    def refused(self, folder, match, **options):
        with pytest.raises(qcore.CheckpointError, match=match):
            qcore.convert(folder, folder.parent / "model.onnx", "onnx", **options)
        assert {p.name for p in folder.parent.iterdir()} == {"own"}

    def test_experts(self, tmp_path):
        quantized("mixtral", tmp_path / "own")
        self.refused(tmp_path / "own", "2 layers cannot be written as onnx:\n.*mlp.experts.*: it holds several experts")

    def test_half_precision(self, tmp_path):
        quantized("llama", tmp_path / "own")
        self.refused(tmp_path / "own", "ONNX is written in float32", dtype=torch.float16)

    def test_no_configuration(self, tmp_path):
        model = torch.nn.Sequential(torch.nn.Linear(64, 32))
        qcore.quantize_(model, "w8a16")
        qcore.save(model, tmp_path / "own")
        self.refused(tmp_path / "own", "no config.json.*\n?.*Copy")

    def test_encoder_with_decoder(self, tmp_path):
        config = transformers.T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4)
        model = transformers.T5ForConditionalGeneration(config)
        qcore.quantize_(model, "w8a16")
        saved(model, tmp_path / "own")
        self.refused(tmp_path / "own", "an encoder-decoder model")
