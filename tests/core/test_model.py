from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import qcore
from qcore.errors import FormatError, QcoreWarning, UnsupportedError
from qcore.model.selection import matches
from qcore.nn import QuantizedConv2d, QuantizedEmbedding, QuantizedLinear


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 64)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(2))
        self.head = nn.Linear(64, 20, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.conv(x.unsqueeze(1)).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(10).view(2, 5)


def states(report):
    return {layer.name: layer.state for layer in report}


def test_every_layer_is_listed_and_replaced():
    model = Net()
    report = qcore.quantize_(model, "w8a16")
    assert states(report) == dict.fromkeys(["embed", "conv", "blocks.0.0", "blocks.1.0", "head"], "quantized")
    assert isinstance(model.embed, QuantizedEmbedding)
    assert isinstance(model.conv, QuantizedConv2d)
    assert isinstance(model.blocks[1][0], QuantizedLinear)
    assert model(TOKENS).shape == (2, 5, 20)
    assert sum(report.kernels().values()) == 5


def test_result_stays_close():
    model = Net().eval()
    expected = model(TOKENS)
    qcore.quantize_(model, "w8a16")
    cosine = torch.cosine_similarity(model(TOKENS), expected, dim=-1)
    assert cosine.min() > 0.999


def test_the_report_is_a_table_with_totals():
    model = Net()
    report = qcore.quantize_(model, "w8a16", exclude="head")
    text = str(report)
    assert text.splitlines()[0].split() == ["layer", "kind", "state", "scheme", "kernel", "before", "after", "why"]
    assert "matches exclude pattern 'head'" in text
    # Behind the totals stand hints, which depend on the processor.
    assert any(line.startswith("5 layers: 4 quantized, 1 excluded, 0 refused; ") for line in text.splitlines())
    floats = sum(p.numel() * 4 for p in Net().parameters() if p.dim() >= 2)
    assert report.bytes_before == floats
    assert report.bytes_after < 0.6 * floats
    assert report["head"].bytes_after == report["head"].bytes_before == 20 * 64 * 4
    assert report.to_json()[0]["name"] == "embed"
    with pytest.raises(KeyError, match="Did you mean 'head'"):
        report["haed"]


def test_report_of_a_model_says_the_same_later():
    model = Net()
    made = qcore.quantize_(model, "w4a16-g32", exclude="conv")
    found = qcore.report(model)
    assert found["embed"] == made["embed"]
    assert (found["conv"].state, found["conv"].bytes_after) == ("float", made["conv"].bytes_after)
    assert found.bytes_after == made.bytes_after
    assert "1 float" in str(found)


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("model.lm_head", "lm_head", True),
        ("model.lm_head", "model.lm_head", True),
        ("model.lm_head", "head", False),
        ("layers.3.mlp.up", "layers.*.mlp.*", True),
        ("layers.3.mlp.up", "mlp.up", True),
        ("layers.3.mlp.up", "*.down", False),
        ("heads[0]", "heads[0]", True),
    ],
)
def test_patterns(name, pattern, expected):
    assert matches(name, pattern) is expected


@pytest.mark.parametrize(
    "arguments",
    [{"exclude": [0]}, {"exclude": 0}, {"include": [torch.nn.Linear]}, {"scheme": {0: "w8a16"}}],
    ids=str,
)
def test_patterns_that_are_no_text(arguments):
    with pytest.raises(FormatError, match="is not a pattern"):
        qcore.quantize_(torch.nn.Sequential(torch.nn.Linear(4, 4)), **{"scheme": "w8a16", **arguments})


def test_what_is_no_module_is_refused():
    with pytest.raises(qcore.UnsupportedError, match=r"takes a torch\.nn\.Module, not a str"):
        qcore.quantize_("model", "w8a16")


def test_exclude_and_include():
    report = qcore.quantize_(Net(), "w8a16", include=["blocks.*", "head"], exclude=["blocks.1.*"])
    assert [name for name, state in states(report).items() if state == "quantized"] == ["blocks.0.0", "head"]
    assert report["embed"].reason == "matches no include pattern"
    assert report["blocks.1.0"].reason == "matches exclude pattern 'blocks.1.*'"


def test_a_mapping_of_patterns_to_schemes():
    model = Net()
    report = qcore.quantize_(model, {"head": "w8a8", "blocks.*": "w4a16-g32", "*.0": "w8a16"})
    assert (report["head"].scheme, report["blocks.0.0"].scheme) == ("w8a8", "w4a16-g32")
    assert report["embed"].reason == "matches no pattern of the scheme mapping"


@pytest.mark.parametrize("kind", ["exclude", "include", "scheme"])
def test_a_pattern_that_matches_nothing_warns_with_a_suggestion(kind):
    arguments = {"scheme": "w8a16", **({kind: ["heda", "*"]} if kind != "scheme" else {})}
    if kind == "scheme":
        arguments["scheme"] = {"heda": "w8a16", "*": "w8a16"}
    with pytest.warns(QcoreWarning, match="pattern 'heda' matches no layer. Did you mean 'head'") as caught:
        qcore.quantize_(Net(), **arguments)
    assert caught[0].filename == __file__


def test_a_model_without_layers_warns_of_no_pattern():
    with pytest.warns(QcoreWarning, match="the model has no layer with a weight; qcore quantizes Linear") as caught:
        assert not list(qcore.quantize_(nn.Sequential(nn.ReLU()), "w8a16"))
    assert [str(warning.message).count("pattern") for warning in caught] == [0]


def test_quantizing_twice_says_so():
    model = Net()
    qcore.quantize_(model, "w8a16")
    report = qcore.quantize_(model, "w4a16")
    assert {layer.state for layer in report} == {"refused"}
    assert report["head"].reason == "already quantized as w8a16"


def test_a_bare_layer_cannot_be_replaced_in_place():
    class Special(nn.Linear):
        pass

    for model in (nn.Linear(4, 4), Special(4, 4)):
        with pytest.raises(UnsupportedError, match=r"Use qcore.nn.QuantizedLinear.from_float\(model, scheme\)"):
            qcore.quantize_(model, "w8a16")


# Refusals


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _patched(linear):
    linear.forward = lambda x: x
    return linear


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (lambda: Scaled(8, 8), "Scaled overrides the forward of Linear"),
        (lambda: _patched(nn.Linear(8, 8)), "Linear overrides the forward of Linear"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), "its weight is parametrized"),
        (lambda: prune.identity(nn.Linear(8, 8), "weight"), "not a parameter but computed"),
        (lambda: nn.LazyLinear(8), "not initialized yet; run the model once"),
        (lambda: nn.Embedding(8, 8, max_norm=1.0), "max_norm"),
        (lambda: nn.ConvTranspose2d(1, 1, 3), "does not support ConvTranspose2d"),
        (lambda: nn.Conv1d(1, 1, 3), "does not support Conv1d"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(1, 1, 3)), "does not support ParametrizedConv1d"),
        (lambda: nn.LSTM(8, 8), "does not support LSTM"),
    ],
)
def test_layers_that_are_refused_are_listed_with_the_reason(layer, words):
    model = nn.Sequential(layer(), nn.Linear(8, 8))
    kept = model[0]
    report = qcore.quantize_(model, "w8a16")
    assert [row.name for row in report] == ["0", "1"]
    assert (report["0"].state, report["1"].state) == ("refused", "quantized")
    assert words in report["0"].reason
    assert model[0] is kept
    assert len(qcore.report(model)) == 2


@pytest.mark.parametrize(("scheme", "words"), [("w8a8-o8", "int8 codes"), ("w8a8-token", "use qcore.linear")])
def test_schemes_that_do_not_fit_a_model_are_refused(scheme, words):
    report = qcore.quantize_(nn.Sequential(nn.Linear(8, 8)), scheme)
    assert report["0"].state == "refused"
    assert words in report["0"].reason


def test_multihead_attention_reads_its_weight_itself():
    attention = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    model = nn.ModuleDict({"attention": attention, "fc": nn.Linear(64, 64)})
    x = torch.randn(2, 5, 64)
    expected = attention(x, x, x)[0]
    report = qcore.quantize_(model, "w8a16")
    assert report["attention"].state == report["attention.out_proj"].state == "refused"
    assert "reads this weight itself" in report["attention.out_proj"].reason
    assert torch.equal(attention(x, x, x)[0], expected)


@pytest.mark.parametrize("training", [False, True])
def test_a_transformer_layer_still_works(training):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), 2)
    encoder.train(training)
    x = torch.randn(2, 5, 64)
    expected = encoder(x)
    report = qcore.quantize_(encoder, "w8a16")
    assert [r.name for r in report.by_state("quantized")] == [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    y = encoder(x)
    assert torch.cosine_similarity(y, expected, dim=-1).min() > 0.999
    with torch.no_grad():
        assert encoder(x, src_key_padding_mask=torch.zeros(2, 5, dtype=torch.bool)).shape == y.shape
    assert encoder.layers[0].training is training
    assert encoder.layers[0].linear1.training is training


# Bytes


def test_a_kernel_says_how_many_bytes_a_handle_stands_for(add_kernel, stub, monkeypatch):
    add_kernel("mine")
    monkeypatch.setattr(stub, "nbytes", lambda kernel, tensor: 1000)
    layer = QuantizedLinear.from_float(nn.Linear(64, 8), "w8a16")
    assert qcore.report(layer).bytes_after == 1000 * len(layer._primary.packed)


# Safety


def test_a_nan_leaves_the_model_untouched():
    model = Net()
    model.head.weight.data[0, 0] = float("nan")
    before = dict(model.named_modules())
    with pytest.raises(FormatError, match="head"):
        qcore.quantize_(model, "w8a16")
    assert dict(model.named_modules()) == before


def test_hooks_are_kept():
    model, seen = Net(), []
    model.head.register_forward_hook(lambda module, args, out: seen.append(type(module)))
    qcore.quantize_(model, "w8a16")
    model(TOKENS)
    assert seen == [QuantizedLinear]


def test_a_model_on_meta():
    with torch.device("meta"):
        model = Net()
    report = qcore.quantize_(model, "w4a16-g32")
    assert report["head"].reason == "on meta: bound when its weights are loaded"
    source = Net()
    qcore.quantize_(source, "w4a16-g32")
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    torch.testing.assert_close(model(TOKENS), source(TOKENS))


def test_under_inference_mode():
    model = Net()
    with torch.inference_mode():
        qcore.quantize_(model, "w8a16")
    model(TOKENS).sum().backward()


# Calibration


def test_static_activations_are_calibrated():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).train()
    x = torch.randn(256, 16)
    expected = model(x)
    report = qcore.quantize_(model, "w8a8-static", calibration=[x])
    assert {layer.scheme for layer in report} == {"w8a8-static"}
    activation = model[2].scheme.activation
    assert activation.zero_point == -128  # nothing below zero after ReLU
    assert activation.scale == pytest.approx(expected.new_tensor(0).item() + _relu_max(x, model) / 255, rel=0.05)
    assert torch.cosine_similarity(model(x), expected, dim=-1).mean() > 0.99
    assert model[0].training


def _relu_max(x, model):
    return float(torch.relu(model[0](x)).detach().max())


def test_without_calibration_the_error_says_what_to_pass():
    model = Net()
    with pytest.raises(FormatError, match="Pass calibration=batches"):
        qcore.quantize_(model, "w8a8-static")
    assert isinstance(model.head, nn.Linear)


def test_no_warning_on_the_plain_way():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Net()
        qcore.quantize_(model, "w4a16-g32", exclude=["head"])
        model(TOKENS)
