"""`out_dtype` of the quantized modules: results of another dtype than x."""

import copy

import pytest
import torch
from torch import nn

import qcore

X = torch.randn(3, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))


def layer(scheme="w8a16"):
    return qcore.nn.QuantizedLinear.from_float(nn.Linear(64, 16, dtype=torch.bfloat16), scheme)


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g32-asym", "w8a8", "mxfp4"])
def test_float_results_of_a_half_precision_layer(scheme):
    made = layer(scheme)
    narrow = made(X)
    made.out_dtype = torch.float32
    wide = made(X)
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(wide.to(torch.bfloat16), narrow, rtol=2e-2, atol=2e-2)
    assert not torch.equal(wide, narrow.float())
    assert copy.deepcopy(made)(X).dtype == torch.float32
    made.out_dtype = None
    assert torch.equal(made(X), narrow)


def test_the_scale_keeps_its_dtype_beside_a_model_of_another():
    weight = qcore.quantize(torch.randn(16, 64), "int8", scale_dtype=torch.float32)
    made = qcore.nn.QuantizedLinear.from_qtensor(weight, dtype=torch.bfloat16)
    assert made(X).dtype == torch.bfloat16
    assert made.weight.scale.dtype == torch.float32
    assert torch.equal(made.to(torch.float16).weight.scale, weight.scale)


def test_compiled_layers_and_tables():
    made = layer()
    made.out_dtype = torch.float32
    with torch.no_grad():
        assert torch.equal(torch.compile(made, fullgraph=True, backend="eager")(X), made(X))
    table = qcore.nn.QuantizedEmbedding.from_float(nn.Embedding(10, 32, dtype=torch.bfloat16), "w8a16")
    table.out_dtype = torch.float32
    assert table(torch.tensor([1, 2])).dtype == torch.float32


def test_dtypes_that_a_result_cannot_have():
    with pytest.raises(qcore.FormatError, match="out_dtype"):
        layer().out_dtype = torch.int32
