"""Weights that an engine cuts by slicing tensors: as a dense weight would be cut, whatever their format."""

from __future__ import annotations

import weakref

import pytest
import torch

import qcore
from qcore import QTensor, Scheme, UnsupportedError
from qcore_vllm.layer_weight import LayerWeight
from qcore_vllm.served import ServedLinear
from qcore_vllm.stored import Notes, Stored

FORMATS = [
    "int4-g32",
    "int4-g32-asym",
    "int4-g24",
    "int8",
    "int4-g32-fzp",
    "int8-g64-asym/plain",
    "int4-g32/plain_int32",
]
N, K = 48, 96


def given(format="int4-g32", n=N, k=K, name="layer", scheme=None, experts=0):
    """A stored weight and its dense values."""
    weights = [qcore.quantize(torch.randn(n, k), format, name=name) for _ in range(max(1, experts))]
    weight = QTensor.stack(weights) if experts else weights[0]
    stored = Stored(name, tuple(weight.shape), torch.float32, scheme or Scheme(weight.format), lambda: weight, Notes())
    return stored, weight.dequantize(torch.float32)


def target(shape, choose=None):
    layer = LayerWeight("model.layer", shape, torch.float32, torch.device("cpu"), choose)
    return layer, layer.parameter(output_dim=0)


def dense_of(layer):
    return torch.cat([part.weight.dequantize(torch.float32) for part in layer.parts()])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_rows_of_a_rank(format, ranks):
    stored, dense = given(format)
    for rank in range(ranks):
        n = N // ranks
        layer, parameter = target((n, K))
        parameter.data.copy_(stored.view().narrow(0, rank * n, n))
        assert torch.equal(dense_of(layer), dense.narrow(0, rank * n, n))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_columns_of_a_rank(format, ranks):
    stored, dense = given(format)
    kinds = set()
    for rank in range(ranks):
        k = K // ranks
        layer, parameter = target((N, k))
        parameter.data.copy_(stored.view().narrow(1, rank * k, k))
        assert torch.equal(dense_of(layer), dense.narrow(1, rank * k, k))
        kinds.add(layer.parts()[0].weight.format)
    assert len(kinds) == 1  # the kernels of all ranks are the same


def test_a_fused_layer_is_joined_where_formats_agree():
    (q, dq), (k, dk), (v, dv) = given(), given(n=16, name="k"), given("int8", n=16, name="v")
    layer, parameter = target((80, K))
    for at, stored in ((0, q), (48, k), (64, v)):
        part = stored.view()
        parameter.data.narrow(0, at, part.shape[0]).copy_(part)
    assert [(part.row, part.rows) for part in layer.parts()] == [(0, 64), (64, 16)]
    dense, bias, x = torch.cat([dq, dk, dv]), torch.randn(80), torch.randn(5, K)
    served = ServedLinear(layer.parts(), bias, torch.float32)
    torch.testing.assert_close(served(x), x @ dense.t() + bias, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(served.without_bias()(x), x @ dense.t(), atol=1e-4, rtol=1e-4)


def test_a_weight_that_is_fused_in_the_file_is_read_once():
    reads = []
    weight = qcore.quantize(torch.randn(N, K), "int4-g32")
    stored = Stored("qkv", (N, K), torch.float32, Scheme(weight.format), lambda: reads.append(0) or weight, Notes())
    layer, parameter = target((N, K))
    for start, piece in zip((0, 16, 32), stored.view().chunk(3, dim=0), strict=True):
        parameter.data.narrow(0, start, 16).copy_(piece)
    assert torch.equal(dense_of(layer), weight.dequantize(torch.float32))
    assert len(reads) == 1


def test_experts_of_a_rank():
    stored, dense = given(experts=4, n=32)
    layer, parameter = target((2, 32, 48))
    for local, expert in enumerate((1, 3)):
        loaded = stored.view()[expert].narrow(1, 48, 48)
        destination = parameter.data[local]
        for start in (0, 16):
            destination.narrow(0, start, 16).copy_(loaded.narrow(0, start, 16))
    for local, expert in enumerate((1, 3)):
        assert torch.equal(layer.parts(local)[0].weight.dequantize(torch.float32), dense[expert][:, 48:])


def test_experts_of_other_ranks_are_not_read():
    stored = Stored("experts", (4, N, K), torch.float32, Scheme.parse("w8a16"), lambda: 1 / 0, Notes())
    assert stored.view()[2].unsqueeze(0).unbind(0)[0].shape == (N, K)


@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w8a16", "w4a16-g32@absmax"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_quantized_at_load_have_the_scales_of_one_rank(scheme, ranks):
    chosen, dense = Scheme.parse(scheme), torch.randn(N, K)
    stored = Stored("layer", (N, K), torch.float32, None, lambda: dense, Notes())
    whole = qcore.quantize(dense, chosen.weight, chosen.quantizer).dequantize(torch.float32)
    for rank in range(ranks):
        k = K // ranks
        layer, parameter = target((N, k), lambda _: chosen)
        parameter.data.copy_(stored.view().narrow(1, rank * k, k))
        assert torch.equal(dense_of(layer), whole.narrow(1, rank * k, k))


def test_weights_quantized_at_load_have_the_models_dtype_first():
    dense = torch.randn(N, K).bfloat16()
    stored = Stored("layer", (N, K), torch.bfloat16, None, lambda: dense, Notes())
    layer, parameter = target((N, K), lambda _: Scheme.parse("w4a16-g32"))
    parameter.data.copy_(stored.view())
    weight = layer.parts()[0].weight
    assert weight.scale.dtype == torch.float32
    assert torch.equal(weight.dequantize(), qcore.quantize(dense.float(), "int4-g32").dequantize())


def test_a_float_weight_is_forgotten_once_it_is_quantized():
    dense, alive = torch.randn(N, K), []

    def read():
        value = dense.clone()
        alive.append(weakref.ref(value))
        return value

    layer, parameter = target((N, K), lambda _: Scheme.parse("w4a16-g32"))
    view = Stored("layer", (N, K), torch.float32, None, read, Notes()).view()
    assert not alive
    parameter.data.copy_(view)
    del view
    assert alive[0]() is None
    assert layer.parts()[0].weight.data.dtype == torch.uint8


def test_a_vocabulary_is_padded_with_zeros():
    stored, dense = given("int4-g32-asym")
    layer, parameter = target((64, K))
    parameter[:N].data.copy_(stored.view())
    parameter[N:].data.fill_(0)
    assert torch.equal(dense_of(layer), torch.cat([dense, torch.zeros(16, K)]))
    assert len(layer.parts()) == 1


def test_a_parameter_that_qcore_did_not_make_gets_floats():
    stored, dense = given()
    parameter = torch.nn.Parameter(torch.empty(N // 2, K), requires_grad=False)
    parameter.data.copy_(stored.view().narrow(0, 24, 24))
    assert torch.equal(parameter, dense[24:])
    assert stored.notes.dense == {"layer"}


def test_what_a_loader_computes_is_dense():
    stored, dense = given()
    assert torch.equal(stored.view().t().contiguous(), dense.t())
    assert stored.notes.dense == {"layer"}


def flipped(experts=0, name="layer"):
    """A stored weight that loaders see as the ``(K, N)`` of its float checkpoint, and its dense values."""
    stored, dense = given(experts=experts, name=name)
    stored.flipped = True
    return stored, dense


def test_a_loader_that_transposes_moves_codes():
    stored, dense = flipped()
    view = stored.view()
    assert view.shape == (K, N)
    for turn in (lambda v: v.t(), lambda v: v.transpose(0, 1), lambda v: v.mT, lambda v: v.permute(1, 0)):
        layer, parameter = target((N, K))
        parameter.data.copy_(turn(view).contiguous())
        assert torch.equal(dense_of(layer), dense)
    assert not stored.notes.dense


def test_slices_of_a_transposed_weight_are_its_rows():
    stored, dense = flipped()
    layer, parameter = target((16, K))
    parameter.data.copy_(stored.view()[:, 8:24].t())
    assert torch.equal(dense_of(layer), dense[8:24])
    layer, parameter = target((N, 32))
    parameter.data.copy_(stored.view().narrow(0, 32, 32).t())
    assert torch.equal(dense_of(layer), dense[:, 32:64])


def test_transposed_experts_are_cut_by_expert():
    stored, dense = flipped(experts=3)
    view = stored.view()
    assert view.shape == (3, K, N)
    layer, parameter = target((2, N, K))
    parameter.data.copy_(view[1:3, ...].permute(0, 2, 1).contiguous())
    for expert in range(2):
        assert torch.equal(layer.parts(expert)[0].weight.dequantize(torch.float32), dense[expert + 1])
    layer, parameter = target((N, K))
    parameter.data.copy_(view[2].t())
    assert torch.equal(dense_of(layer), dense[2])


def test_values_of_a_transposed_weight_are_those_of_its_file():
    stored, dense = flipped()
    assert torch.equal(stored.view() + 0, dense.t())
    stored, dense = flipped(experts=2)
    assert torch.equal(stored.view()[:, 3:9, 4:7] + 0, dense.mT[:, 3:9, 4:7])


# What is refused.


def test_a_weight_that_was_not_transposed_is_refused():
    stored, _ = given(n=K)
    stored.flipped = True
    _, parameter = target((K, K))
    with pytest.raises(UnsupportedError, match="vLLM did not transpose 'layer'"):
        parameter.data.copy_(stored.view())


def test_an_order_cannot_be_cut():
    weight = qcore.quantize(torch.randn(N, K), "int4-g32").derived(order=torch.randperm(K, dtype=torch.int32))
    stored = Stored("model.layers.7.o_proj", (N, K), torch.float32, Scheme(weight.format), lambda: weight, Notes())
    _, parameter = target((N, 48))
    with pytest.raises(UnsupportedError, match=r"model\.layers\.7\.o_proj.*act-order"):
        parameter.data.copy_(stored.view().narrow(1, 0, 48))


def test_rows_that_never_came_are_named():
    layer, parameter = target((N, K))
    parameter.data.narrow(0, 0, 16).copy_(given()[0].view().narrow(0, 0, 16))
    with pytest.raises(UnsupportedError, match=r"model\.layer: row 16 of 48"):
        layer.parts()


def test_a_weight_of_another_shape_is_refused():
    _, parameter = target((N, K))
    with pytest.raises(UnsupportedError, match=r"shape \(48, 96\) does not fit into \(24, 96\)"):
        parameter.data.narrow(0, 0, 24).copy_(given()[0].view())


def test_a_quantized_weight_cannot_be_changed():
    _, parameter = target((N, K))
    with pytest.raises(UnsupportedError, match=r"(?s)model\.layer: its weight is quantized.*aten"):
        parameter.data.add_(1)


def test_results_in_int8_cannot_be_passed_on():
    scheme = Scheme.parse("w8a8-static(0.02,0)-o8(0.1,0)")
    stored, _ = given("int8", scheme=scheme)
    layer, parameter = target((N, K))
    parameter.data.copy_(stored.view())
    with pytest.raises(UnsupportedError, match="-o8"):
        ServedLinear(layer.parts(), None, torch.float32)
