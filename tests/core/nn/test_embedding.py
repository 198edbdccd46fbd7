from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qcore
from qcore.nn import QuantizedEmbedding


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g32", "w4a16-g32-asym", "w8a8", "w4a16-g32/plain_int32"])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_of_the_dequantized_table(scheme, shape, dtype):
    layer = QuantizedEmbedding.from_float(nn.Embedding(20, 64), scheme)
    indices = torch.randint(0, 20, shape, dtype=dtype)
    y = layer(indices)
    assert y.shape == (*shape, 64)
    assert torch.equal(y, layer.weight.dequantize(torch.float32)[indices.long()])
    assert layer.scheme.activation is None


def test_the_padding_row_stays_zero():
    layer = QuantizedEmbedding.from_float(nn.Embedding(20, 64, padding_idx=3), "w4a16-g32-asym")
    assert layer.padding_idx == 3
    assert not layer(torch.tensor([3])).any()


@pytest.mark.parametrize("index", [20, -1])
def test_an_index_out_of_range_is_an_error(index):
    layer = QuantizedEmbedding.from_float(nn.Embedding(20, 64), "w8a16")
    for _ in range(2):
        with pytest.raises(IndexError, match=r"0\.\.19"):
            layer(torch.tensor([0, index]))
        layer(torch.tensor([0, 19]))


def test_bad_input_at_the_first_call_does_not_fail_the_kernel(add_kernel):
    add_kernel("mine")
    layer = QuantizedEmbedding.from_float(nn.Embedding(20, 64), "w8a16")
    with pytest.raises(IndexError):
        layer(torch.tensor([20]))
    assert layer(torch.tensor([1])).shape == (1, 64)
    assert layer.decision.plugin == "mine"
    assert QuantizedEmbedding.from_float(nn.Embedding(20, 64), "w8a16").decision.plugin == "mine"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.uint8])
def test_indices_of_another_dtype_are_an_error(add_kernel, dtype):
    add_kernel("mine")
    layer = QuantizedEmbedding.from_float(nn.Embedding(20, 64), "w8a16")
    for _ in range(2):
        with pytest.raises(qcore.FormatError, match=r"indices have dtype .*; they must be int64 or int32"):
            layer(torch.ones(3).to(dtype))
        with pytest.raises(qcore.FormatError, match="they must be int64 or int32"):
            qcore.embedding(torch.ones(3).to(dtype), layer.weight)
    layer(torch.tensor([1]))
    assert layer.decision.plugin == "mine"


def test_dtypes():
    layer = QuantizedEmbedding.from_float(nn.Embedding(20, 64), "w8a16").to(torch.bfloat16)
    assert layer(torch.tensor([1])).dtype == layer.weight.dtype == torch.bfloat16
    qt = qcore.quantize(torch.randn(20, 64), "int8")
    assert QuantizedEmbedding.from_qtensor(qt, dtype=torch.float16)(torch.tensor([1])).dtype == torch.float16
    with torch.autocast("cpu", torch.float16):
        assert layer(torch.tensor([1])).dtype == torch.bfloat16  # as torch.nn.Embedding


def test_models_of_float64():
    indices, model = torch.tensor([1]), nn.Sequential(nn.Embedding(20, 64), nn.LayerNorm(64), nn.Linear(64, 4))
    wanted = model.double()(indices)
    qcore.quantize_(model, "w8a16")
    torch.testing.assert_close(model(indices), wanted, rtol=0.02, atol=0.02)
    for dtype in (torch.float16, torch.float64, torch.float32, torch.bfloat16, torch.float64):
        assert model.to(dtype)(indices).dtype == dtype
    with torch.no_grad():
        assert torch.compile(model, backend="eager")(indices).dtype == torch.float64


def test_max_norm_is_refused():
    with pytest.raises(qcore.UnsupportedError, match="max_norm rewrites its table"):
        QuantizedEmbedding.from_float(nn.Embedding(20, 64, max_norm=1.0), "w8a16")


def test_state_dict_and_copies(add_kernel):
    add_kernel("mine")
    layer, other = (QuantizedEmbedding.from_float(nn.Embedding(20, 64), "w4a16-g32-asym") for _ in range(2))
    indices = torch.arange(20)
    assert layer.decision.plugin == "mine"
    assert set(layer.state_dict()) == {"weight.data", "weight.scale", "weight.zero"}
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(indices), layer(indices))
    assert torch.equal(copy.deepcopy(layer)(indices), layer(indices))


def test_compile_and_export():
    torch._dynamo.reset()
    layer = QuantizedEmbedding.from_float(nn.Embedding(20, 64), "w4a16-g32").eval()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for count in (3, 5):
        indices = torch.arange(count)
        assert torch.equal(compiled(indices), layer(indices))
    program = torch.export.export(layer, (torch.arange(4),), dynamic_shapes=({0: torch.export.Dim("n")},))
    assert torch.equal(program.module()(torch.arange(7)), layer(torch.arange(7)))


def test_the_repr():
    text = repr(QuantizedEmbedding.from_float(nn.Embedding(20, 64), "w8a16"))
    assert text.startswith("QuantizedEmbedding(20, 64, scheme=w8a16, kernel=torch.")
