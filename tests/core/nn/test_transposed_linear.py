"""transformers' Conv1D, as in GPT-2: a linear layer whose float weight is (K, N)."""

import copy

import pytest
import torch
from torch import nn

import qcore
from qcore.checkpoint import quantize_checkpoint
from qcore.nn import QuantizedLinear


class Conv1D(nn.Module):
    """Its stand-in: the class is known by its name, as transformers is not imported."""

    def __init__(self, n, k):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(k, n)), nn.Parameter(torch.randn(n))

    def forward(self, x):
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"
X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


def model():
    torch.manual_seed(0)
    return nn.Sequential(Conv1D(96, 64), nn.ReLU(), Conv1D(96, 96), nn.Linear(96, 8))


def quantized_model():
    layers = model()
    qcore.quantize_(layers, "w8a16")
    return layers


def relative(found, wanted):
    return float((found - wanted).detach().norm() / wanted.detach().norm())


@pytest.mark.parametrize(("scheme", "most"), [
    ("w8a16", 0.02), ("w8a8", 0.03), ("w4a16-g32", 0.3), ("w4a16-g32@gptq", 0.3), ("w4a16-g32@awq", 0.3),
    ("w8a8-static", 0.05),
])  # fmt: skip
def test_computes_what_the_float_layer_computes(scheme, most):
    layers = model()
    wanted = layers(X)
    report = qcore.quantize_(layers, scheme, calibration=[X])
    assert [row.state for row in report] == ["quantized"] * 3
    assert [type(layers[i]) for i in (0, 2)] == [QuantizedLinear] * 2
    assert layers[2].weight.shape == (96, 96)
    assert relative(layers(X), wanted) < most


def test_the_weight_is_that_of_the_linear_layer():
    layers = model()
    dense = layers[2].weight.detach().t().contiguous()
    qcore.quantize_(layers, "w4a16-g32")
    assert torch.equal(layers[2].weight.data, qcore.quantize(dense, "int4-g32").data)


@pytest.mark.parametrize("state", [lambda layers: layers, lambda layers: layers.state_dict()])
@pytest.mark.parametrize("target", [model, quantized_model])
def test_a_square_weight_is_loaded_as_it_was_saved(state, target, tmp_path):
    layers = quantized_model()
    qcore.save(state(layers), tmp_path / "m.safetensors")
    loaded = target()
    qcore.load_(loaded, tmp_path / "m.safetensors")
    assert torch.equal(loaded(X), layers(X))


def test_a_weight_that_was_set_anew_is_loaded_as_it_was_saved(tmp_path):
    layers = quantized_model()
    layers[2].weight = qcore.quantize(layers[2].weight.dequantize(torch.float32) * 0.5, "int8")
    qcore.save(layers, tmp_path / "m.safetensors")
    loaded = model()
    qcore.load_(loaded, tmp_path / "m.safetensors")
    assert torch.equal(loaded(X), layers(X))


def test_one_with_hooks_as_its_forward_takes_a_saved_weight(tmp_path):
    layers, loaded = quantized_model(), model()
    qcore.save(layers, tmp_path / "m.safetensors")
    for i in (0, 2):
        loaded[i].forward = loaded[i].forward  # as accelerate wraps it
    qcore.load_(loaded, tmp_path / "m.safetensors")
    assert relative(loaded(X), layers(X)) < 1e-6


def test_two_that_share_a_weight(tmp_path):
    layers = nn.Sequential(Conv1D(64, 64), Conv1D(64, 64))
    layers[1].weight = layers[0].weight
    float_copy, wanted = copy.deepcopy(layers), layers(X)
    qcore.quantize_(layers, "w8a16")
    assert relative(layers(X), wanted) < 0.02
    qcore.save(layers, tmp_path / "m.safetensors")
    qcore.load_(float_copy, tmp_path / "m.safetensors")
    assert torch.equal(float_copy(X), layers(X))


def test_what_is_quantized_without_the_model_is_loaded_as_floats(tmp_path):
    layers = model()
    qcore.save(layers, tmp_path / "float")
    quantize_checkpoint(tmp_path / "float", tmp_path / "own", "w8a16")
    loaded = model()
    report = qcore.load_(loaded, tmp_path / "own")
    assert "transpose" in report["2"].reason
    assert relative(loaded(X), layers(X)) < 0.02


def test_a_weight_tied_to_one_that_lies_otherwise_stays_float():
    layers = nn.Sequential(Conv1D(64, 64), nn.Linear(64, 64))
    layers[1].weight = layers[0].weight
    wanted = layers(X)
    report = qcore.quantize_(layers, "w8a16")
    assert [row.state for row in report] == ["refused"] * 2
    assert torch.equal(layers(X), wanted)


def test_one_with_a_forward_of_its_own_stays_float():
    layers = model()
    layers[0].forward = lambda x: x @ layers[0].weight
    assert qcore.quantize_(layers, "w8a16")["0"].state == "refused"


def test_a_copy_computes_the_same():
    layers = quantized_model()
    assert torch.equal(copy.deepcopy(layers)(X), layers(X))
