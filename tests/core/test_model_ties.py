"""Layers that share a weight: which scheme they get, what they hold, and what model code does with them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qcore
from qcore.discovery.kernels import Offer
from qcore.errors import FormatError, QcoreWarning
from qcore.nn import QuantizedLinear

TOKENS = torch.arange(10).view(2, 5)


def states(report):
    return {layer.name: layer.state for layer in report}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 64)
        self.head = nn.Linear(64, 20)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def shares(model):
    """Whether both layers hand out the same tensors, and hold the same ones where their kernels read the same form."""
    ours, theirs = (layer._primary for layer in (model.embed, model.head))
    assert model.embed._store is model.head._store
    if ours.kernel.packing == theirs.kernel.packing and ours.packed is not theirs.packed:
        return False
    state = model.state_dict()
    keys = [key.removeprefix("head.") for key in state if key.startswith("head.weight")]
    return all(state[f"head.{key}"].data_ptr() == state[f"embed.{key}"].data_ptr() for key in keys)


@pytest.fixture(params=["fallback", "stub"])
def served(request, add_kernel):
    if request.param == "stub":
        add_kernel("mine")


def test_tied_layers_stay_tied(served):
    model = Tied().eval()
    expected = model(TOKENS)
    report = qcore.quantize_(model, "w8a16")
    assert states(report) == {"embed": "quantized", "head": "quantized"}
    assert report["head"].tied_to == "embed"
    assert report.bytes_before == 20 * 64 * 4
    # Tensors in oneDNN's own layout are no buffers.
    packed = [t for layer in (model.embed, model.head) for t in layer._primary.packed.values()]
    distinct = {id(t): t.numel() * t.element_size() for t in packed}
    assert qcore.report(model).bytes_after == report.bytes_after == sum(distinct.values())
    assert torch.cosine_similarity(model(TOKENS), expected, dim=-1).min() > 0.999
    assert shares(model)


def tied_and_quantized():
    model = Tied()
    qcore.quantize_(model, "w8a16")
    return model


def _through_meta(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.bfloat16),
        copy.deepcopy,
        lambda model: (model.load_state_dict(model.state_dict()), model)[1],
        lambda model: (model.load_state_dict(tied_and_quantized().state_dict(), assign=True), model)[1],
        _through_meta,
    ],
    ids=["cast", "deepcopy", "load", "assign", "meta"],
)
def test_ties_survive(served, change):
    model = change(tied_and_quantized())
    assert shares(model)
    assert model(TOKENS).shape == (2, 5, 20)


def test_loading_one_tied_layer_changes_both(served):
    model, other = tied_and_quantized(), tied_and_quantized()
    model.head.load_state_dict(other.head.state_dict())
    assert torch.equal(model.embed(TOKENS), other.embed(TOKENS))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"exclude": "head"}, "matches exclude pattern 'head'"),
        ({"exclude": "head", "include": ["head", "embed"]}, "matches exclude pattern 'head'"),
    ],
)
def test_excluding_one_name_of_a_tied_weight_leaves_it_float(arguments, reason):
    model = Tied()
    with pytest.warns(QcoreWarning, match="embed as w8a16, head as float.\nAll of them get float, since 'head'"):
        report = qcore.quantize_(model, "w8a16", **arguments)
    assert (report["head"].state, report["head"].reason) == ("excluded", reason)
    assert (report["embed"].state, report["embed"].reason) == (
        "excluded",
        f"its weight is tied to 'head', which {reason}",
    )
    assert model.head.weight is model.embed.weight
    assert report.bytes_after == report.bytes_before == 20 * 64 * 4


@pytest.mark.parametrize(
    ("scheme", "include", "used", "deciding"),
    [
        ({"head": "w8a16", "*": "w4a16-g32"}, None, "w8a16", "head"),
        ({"head": "w8a16", "embed": "w4a16-g32"}, None, "w8a16", "head"),
        ({"embed": "w4a16-g32", "head": "w8a16"}, None, "w4a16-g32", "embed"),
        ({"head": "w8a16"}, None, "w8a16", "head"),
        ("w8a16", "embed", "w8a16", "embed"),
    ],
)
def test_the_first_pattern_matching_a_tied_name_decides(scheme, include, used, deciding):
    model, other = Tied(), {"head": "embed", "embed": "head"}[deciding]
    with pytest.warns(QcoreWarning, match=f"All of them get {used}, since '{deciding}' matches pattern"):
        report = qcore.quantize_(model, scheme, include=include)
    assert {(layer.state, layer.scheme) for layer in report} == {("quantized", used)}
    assert report[other].reason.startswith(f"its weight is tied to '{deciding}', which matches pattern")
    assert shares(model)


def test_tied_layers_may_differ_in_their_activations():
    model = Tied()
    report = qcore.quantize_(model, {"head": "w8a8", "*": "w8a16"})
    assert {layer.name: layer.scheme for layer in report} == {"head": "w8a8", "embed": "w8a16"}
    assert shares(model)


@pytest.mark.filterwarnings("ignore:the patterns select different schemes")
def test_a_module_in_two_places_goes_by_both_names():
    shared = nn.Linear(8, 8)
    for exclude in ("0", "2"):
        report = qcore.quantize_(nn.Sequential(shared, nn.ReLU(), shared), "w8a16", exclude=exclude)
        assert states(report) == {"0": "excluded"}
    report = qcore.quantize_(nn.Sequential(shared, nn.ReLU(), shared), {"2": "w8a16", "*": "w4a16"})
    assert report["0"].scheme == "w8a16"


@pytest.mark.parametrize("kind", [Tied, lambda: nn.Sequential(nn.Linear(64, 32), nn.Conv2d(4, 4, 3), nn.LSTM(4, 4))])
def test_a_second_call_reports_what_is_held(kind):
    model = kind()
    first, second = qcore.quantize_(model, "w8a16"), qcore.quantize_(model, "w8a16")
    assert (second.bytes_before, second.bytes_after) == (first.bytes_before, first.bytes_after)
    assert second.bytes_after == qcore.report(model).bytes_after
    assert [(row.bytes_after, row.bytes_shared, row.tied_to) for row in second] == [
        (row.bytes_after, row.bytes_shared, row.tied_to) for row in first
    ]
    assert not second.by_state("quantized")


def test_a_table_packed_by_two_kernels_is_counted_twice(add_plugin, stub):
    made = {}
    add_plugin("mine", linear=lambda request: Offer(made.setdefault(request, stub("mine.kernel", request))))
    model = Tied()
    report = qcore.quantize_(model, "w8a16")
    neutral = 20 * 64 + 20 * 4
    assert [row.bytes_after for row in report] == [neutral, neutral]
    assert report["head"].bytes_shared == 0
    assert report.bytes_after == 2 * neutral == sum(b.numel() * b.element_size() for b in model.buffers())
    alone = Tied()
    with qcore.using("torch"):
        report = qcore.quantize_(alone, "w4a16-g32")
    assert report["head"].bytes_shared == report["head"].bytes_after  # both kernels read the neutral tensors
    assert report.bytes_after == report["embed"].bytes_after


# What model code does with weights: `tie_weights` and `resize_token_embeddings` of transformers, in small


def tie_weights(model):
    """As transformers 5 does it: by names, through get_parameter and get_buffer."""
    try:
        weight = model.get_parameter("embed.weight")
    except AttributeError:
        weight = model.get_buffer("embed.weight")
    model.head.weight = weight


def tie_modules(model):
    """As transformers 4 does it: by modules."""
    model.head.weight = model.embed.weight
    assert len(model.head.bias) == model.head.weight.shape[0]


@pytest.mark.parametrize("tie", [tie_weights, tie_modules])
def test_weights_that_are_tied_once_more_stay_as_they_are(tie):
    model = tied_and_quantized()
    expected, bound = model(TOKENS), model.head._primary
    tie(model)
    assert shares(model)
    assert model.head._primary is bound
    assert torch.equal(model(TOKENS), expected)


@pytest.mark.parametrize("tie", [tie_weights, tie_modules])
def test_weights_can_be_tied_after_quantizing(tie, served):
    model = Tied()
    model.head.weight = nn.Parameter(torch.randn(20, 64))
    qcore.quantize_(model, {"head": "w8a8", "embed": "w4a16-g32"})
    model(TOKENS)
    assert model.head._store is not model.embed._store
    tie(model)
    assert shares(model)
    assert str(model.head.scheme) == "w4a8-g32"
    dense = model.embed.weight.dequantize()
    expected = nn.functional.linear(nn.functional.embedding(TOKENS, dense), dense, model.head.bias)
    assert torch.cosine_similarity(model(TOKENS), expected, dim=-1).min() > 0.999
    assert copy.deepcopy(model)(TOKENS).equal(model(TOKENS))


def test_a_weight_of_its_own_can_be_given():
    layer = QuantizedLinear.from_float(nn.Linear(64, 8), "w8a16")
    weight = qcore.quantize(torch.randn(8, 64), "int4-g32")
    layer.weight = weight
    assert torch.equal(layer.weight.dequantize(), weight.dequantize())
    assert str(layer.scheme) == "w4a16-g32"


def test_a_weight_that_does_not_fit_is_refused():
    layer = QuantizedLinear.from_float(nn.Linear(64, 8), "w8a16")
    with pytest.raises(FormatError, match="must be a QTensor, not a Parameter"):
        layer.weight = nn.Parameter(torch.randn(8, 64))
    with pytest.raises(FormatError, match=r"shape \(9, 64\); this layer needs \(8, 64\)"):
        layer.weight = qcore.quantize(torch.randn(9, 64), "int8")


def test_model_code_finds_the_weight_and_counts_nothing_twice():
    model = tied_and_quantized()
    weight = model.get_submodule("embed").weight
    assert (weight.shape, weight.dtype, weight.requires_grad) == ((20, 64), torch.float32, False)
    assert {name for name, _ in model.named_parameters()} == {"head.bias"}
    assert "embed.weight" not in dict(model.named_buffers())
    assert not [key for key in model.state_dict() if key.endswith(".weight")]


def test_tied_convolutions_are_refused():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1))
    model[1].weight = model[0].weight
    report = qcore.quantize_(model, "w8a16")
    assert states(report) == {"0": "refused", "1": "refused", "2": "quantized"}
    assert "convolutions cannot share" in report["0"].reason


def test_one_module_in_two_places_is_one_layer():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    report = qcore.quantize_(model, "w8a16")
    assert states(report) == {"0": "quantized"}
    assert model[0] is model[2]
    assert isinstance(model[2], QuantizedLinear)


def test_tied_linear_layers_keep_their_own_bias():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    biases = [layer.bias for layer in model]
    qcore.quantize_(model, "w8a16")
    assert all(layer.bias is bias for layer, bias in zip(model, biases, strict=True))
    assert model[0]._store is model[1]._store


def test_a_static_model_needs_no_numbers_for_its_embeddings():
    model = Tied()
    report = qcore.quantize_(model, "w8a8-static", calibration=lambda m: m(TOKENS))
    assert model.head.scheme.activation.is_given
    assert model.embed.scheme.activation is None
    assert states(report) == {"embed": "quantized", "head": "quantized"}


def test_one_module_of_two_names_that_get_different_schemes():
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    with pytest.warns(qcore.QcoreWarning, match=r"0 as w8a16, 2 as w4a16.\nIt gets w8a16"):
        qcore.quantize_(model, {"0": "w8a16", "2": "w4a16"})
    assert model[0] is model[2]
