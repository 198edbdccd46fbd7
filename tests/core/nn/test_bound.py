"""`qcore.nn.bound`: the view of a layer that plugins for whole graphs use."""

from __future__ import annotations

import pytest
import torch

import qcore
from qcore.plugin_api import binding_of, bound_layer, layer_contract


def layer(scheme: str = "w8a16") -> qcore.nn.QuantizedLinear:
    return qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(32, 8), scheme)


def test_names_the_contract_of_each_kind() -> None:
    conv = qcore.nn.QuantizedConv2d.from_float(torch.nn.Conv2d(4, 8, 3), "w8a16")
    table = qcore.nn.QuantizedEmbedding.from_float(torch.nn.Embedding(10, 8), "w8a16")
    assert [layer_contract(one) for one in (layer(), conv, table)] == ["linear", "conv2d", "embedding"]
    assert layer_contract(torch.nn.Linear(2, 2)) == ""


def test_a_subclass_is_another_module() -> None:
    class Own(qcore.nn.QuantizedLinear):
        pass

    assert layer_contract(Own.from_float(torch.nn.Linear(32, 8), "w8a16")) == ""


def test_kernel_and_packed_weight_compute_as_the_layer_does() -> None:
    module, x = layer(), torch.randn(3, 32)
    bound = bound_layer(module)
    with torch.no_grad():
        assert torch.equal(bound.kernel(x, dict(bound.packed), module.bias), module(x))
    assert bound.request.out_dtype == torch.float32
    assert bound_layer(module, torch.bfloat16).request.out_dtype == torch.bfloat16


def test_tells_of_padding_that_the_layer_adds() -> None:
    conv = torch.nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect")
    assert bound_layer(qcore.nn.QuantizedConv2d.from_float(conv, "w8a16")).outer_padding == (1, 1, 1, 1)
    assert bound_layer(layer()).outer_padding == ()


def test_another_weight_is_another_binding() -> None:
    module = layer()
    before = binding_of(module)
    assert binding_of(module) is before
    module.weight = qcore.quantize(torch.randn(8, 32), "int8")
    assert binding_of(module) is not before
    plain = torch.nn.ReLU()
    assert binding_of(plain) is plain


def test_refuses_other_modules_and_the_meta_device() -> None:
    with pytest.raises(TypeError, match="ReLU"):
        bound_layer(torch.nn.ReLU())
    with pytest.raises(qcore.FormatError, match="meta"):
        bound_layer(layer().to("meta"))
