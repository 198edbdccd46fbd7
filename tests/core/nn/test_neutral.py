"""`NeutralLinear`: the layer whose weight stays in the neutral format, as parameters."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import qcore
from qcore.nn import NeutralLinear, QuantizedLinear
from qcore.parallel import pack_, unpack_

SCHEMES = (
    "w4a16-g32-asym@minmax", "w8a8", "w8a8-static(0.05,3)-o8(0.1,2)", "wfp8afp8", "wfp4a16-g16-e4m3", "wnf4a16-g64",
    "w4a16-g32-fzp", "mxfp4",
)  # fmt: skip


def both(scheme="w4a16-g32@absmax", bias=True):
    layer = QuantizedLinear.from_float(nn.Linear(96, 40, bias).requires_grad_(False), scheme)
    return layer, NeutralLinear.from_linear(layer)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_computes_what_the_packed_layer_computes(scheme):
    layer, neutral = both(scheme)
    x = torch.randn(2, 5, 96)
    torch.testing.assert_close(neutral(x).float(), layer(x).float(), rtol=1e-5, atol=1e-5)
    back = neutral.packed()
    assert torch.equal(back(x), layer(x))
    assert all(torch.equal(t, layer.weight.tensors()[name]) for name, t in back.weight.tensors().items())


def test_weights_with_an_order():
    layer, _ = both()
    ordered = layer.weight.derived(order=torch.randperm(96).int())
    x = torch.randn(3, 96)
    torch.testing.assert_close(NeutralLinear.from_qtensor(ordered)(x), qcore.linear(x, ordered), rtol=1e-5, atol=1e-5)


def test_parts_are_frozen_parameters_with_the_names_of_a_state():
    layer, neutral = both("wfp4a16-g16-e4m3")
    found = dict(neutral.named_parameters())
    assert found.keys() == {"bias", "weight.data", "weight.scale"}
    assert dict(neutral.named_buffers()).keys() == {"weight.global_scale"}
    assert not any(parameter.requires_grad for parameter in found.values())
    assert neutral.state_dict().keys() == layer.state_dict().keys()


def test_states_of_the_two_kinds_fit_each_other():
    (layer, _), (_, neutral) = both("w8a8-static(0.05,3)"), both("w8a8-static(0.07,1)")
    x = torch.randn(3, 96)
    neutral.load_state_dict(layer.state_dict())
    torch.testing.assert_close(neutral(x), layer(x))
    other = both("w8a8-static(0.01,0)")[0]
    other.load_state_dict(neutral.state_dict())
    torch.testing.assert_close(other(x), layer(x))


def test_checkpoint_of_a_model_with_neutral_layers(tmp_path):
    model = nn.Sequential(nn.Linear(64, 32)).requires_grad_(False)
    qcore.quantize_(model, "w8a16")
    x = torch.randn(2, 64)
    want = model(x)
    assert unpack_(model) == ["0"]
    qcore.save(model, tmp_path / "m.safetensors")
    fresh = nn.Sequential(nn.Linear(64, 32))
    qcore.load_(fresh, tmp_path / "m.safetensors")
    torch.testing.assert_close(fresh(x), want)


def test_report_has_a_row_for_it():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    qcore.quantize_(model, "w8a16")
    before = qcore.report(model)
    unpack_(model, exclude="1")
    found = qcore.report(model)
    assert [(row.name, row.kind, row.state) for row in found] == [
        ("0", "NeutralLinear", "quantized"), ("1", "QuantizedLinear", "quantized"),
    ]  # fmt: skip
    assert found["0"].kernel == "torch.plain.linear"
    assert found["0"].bytes_before == before["0"].bytes_before
    assert found["0"].bytes_after == 64 * 32 + 32 * 4
    assert pack_(model) == ["0"]
    assert isinstance(model[0], QuantizedLinear)


def test_gradients_of_x_and_bias():
    layer, neutral = both()
    x, other = torch.randn(3, 96, requires_grad=True), torch.randn(3, 96)
    neutral.bias.requires_grad_(True)
    neutral(x).square().sum().backward()
    dense = layer.weight.dequantize()
    y = (x.detach() @ dense.t() + layer.bias.detach()) * 2
    torch.testing.assert_close(x.grad, y @ dense)
    torch.testing.assert_close(neutral.bias.grad, y.sum(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert neutral(other).dtype == torch.bfloat16


def test_casting_moves_no_scale_and_copies_are_equal():
    neutral = both()[1]
    x = torch.randn(3, 96)
    twins = [copy.deepcopy(neutral), pickle.loads(pickle.dumps(neutral))]
    assert all(torch.equal(twin(x), neutral(x)) for twin in twins)
    half = neutral.bfloat16()
    assert half.weight.scale.dtype == torch.float32
    assert half.bias.dtype == torch.bfloat16
    assert half(x.bfloat16()).dtype == torch.bfloat16


def test_scales_that_a_tool_has_cast_are_refused():
    neutral = both()[1]
    neutral.weight.scale = nn.Parameter(neutral.weight.scale.bfloat16(), requires_grad=False)
    with pytest.raises(qcore.FormatError, match=r"weight.scale was cast to torch.bfloat16.*\n.*MixedPrecisionPolicy"):
        neutral(torch.randn(1, 96))


def test_wrong_inputs():
    neutral = both()[1]
    with pytest.raises(qcore.FormatError, match="in_features = 96"):
        neutral(torch.randn(2, 95))
    with pytest.raises(qcore.FormatError, match="lacks its scale"):
        NeutralLinear.from_float(nn.Linear(8, 8), "w8a8-static")
    tied = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    tied["b"].weight = tied["a"].weight
    qcore.quantize_(tied, "w8a16")
    with pytest.raises(qcore.UnsupportedError, match="a shares its weight with another layer"):
        unpack_(tied)
    with pytest.raises(qcore.UnsupportedError, match="cannot be replaced in place"):
        unpack_(both()[0])
