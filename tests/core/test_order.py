"""Weights whose stored columns are in another order than the features of x."""

import copy
import pickle

import pytest
import torch

import qcore
from qcore.resolving import ordering

N, K = 48, 128


def ordered(text="int4-g32-asym/plain", seed=0):
    generator = torch.Generator().manual_seed(seed)
    dense, order = torch.randn(N, K, generator=generator), torch.randperm(K, generator=generator)
    return qcore.quantize(dense[:, order], text).derived(order=order.int()), dense


def rows(count=5):
    return torch.randn(count, K, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize(
    "text", ["int4-g32-asym/plain", "int8/plain", "fp4-g32-e8m0/plain", "int4-g32-fzp/plain_int32"]
)
def test_dequantize_undoes_the_order(text):
    qt, dense = ordered(text)
    stored = qt.derived(order=None).dequantize()
    assert torch.equal(qt.dequantize()[:, qt.order.long()], stored)
    assert (qt.dequantize() - dense).norm() < 0.2 * dense.norm()


def test_kernels_get_x_in_the_stored_order():
    qt, _ = ordered()
    layer = qcore.nn.QuantizedLinear.from_qtensor(qt)
    expected = rows() @ qt.dequantize().t()
    torch.testing.assert_close(layer(rows()), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(qcore.linear(rows(), qt), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(layer.weight.order, qt.order)
    assert torch.equal(layer.weight.dequantize(), qt.dequantize())


def test_gradients_are_in_the_order_of_x():
    qt, _ = ordered()
    x = rows().requires_grad_()
    qcore.nn.QuantizedLinear.from_qtensor(qt)(x).sum().backward()
    torch.testing.assert_close(x.grad, qt.dequantize().sum(0).expand(5, -1), rtol=1e-4, atol=1e-4)


def test_copies_pickles_and_moves_keep_the_order():
    qt, _ = ordered()
    layer = qcore.nn.QuantizedLinear.from_qtensor(qt)
    expected = layer(rows())
    assert torch.equal(copy.deepcopy(layer)(rows()), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(rows()), expected)
    assert torch.equal(layer.half().float()(rows()), expected)


def test_compiled_without_a_break():
    layer = qcore.nn.QuantizedLinear.from_qtensor(ordered()[0])
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(rows()), layer(rows()))


def test_layers_that_read_one_x_share_the_gather():
    order = ordered()[0].order
    x = rows()
    mine, other = ordering.interned(order), ordering.interned(order.clone())
    assert mine is other
    first = ordering.gathered(x, mine)
    assert ordering.gathered(x, other) is first
    assert torch.equal(first, x[:, order.long()])


def test_a_gather_is_not_shared_with_an_x_that_changed():
    order = ordering.interned(ordered()[0].order)
    x = rows()
    first = ordering.gathered(x, order)
    x.add_(1)
    second = ordering.gathered(x, order)
    assert second is not first
    assert torch.equal(second, x[:, order.long()])
    assert ordering.gathered(rows(), order) is not second


def test_a_gather_dies_with_its_x():
    order = ordering.interned(ordered()[0].order)
    x = rows()
    ordering.gathered(x, order)
    assert ordering._last.result is not None
    del x
    assert ordering._last.result is None


def test_other_contracts_refuse_an_order():
    qt, _ = ordered()
    with pytest.raises(qcore.FormatError, match="embedding does not support a weight with an order"):
        qcore.embedding(torch.tensor([1]), qt)
    with pytest.raises(qcore.FormatError, match="conv2d does not support a weight with an order"):
        qcore.conv2d(torch.randn(1, K, 3, 3), qt, kernel_size=1)


def test_activations_in_groups_refuse_an_order():
    with pytest.raises(qcore.FormatError, match="in groups cannot be combined"):
        qcore.linear(rows(), ordered("fp8-g32/plain")[0], activation=qcore.DynamicFP8(32))


@pytest.mark.parametrize("wrong", [torch.zeros(K), torch.arange(K + 1), torch.arange(1, K + 1)])
def test_what_is_no_order_is_refused(wrong):
    qt = ordered()[0]
    with pytest.raises(qcore.FormatError, match="order"):
        qcore.QTensor(qt.data, qt.scale, qt.zero, qt.shape, qt.format, order=wrong.int())
