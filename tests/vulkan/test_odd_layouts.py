"""Any strides, steps of 0, offsets and the negative bit, of every tensor that a call or a weight brings along."""

from __future__ import annotations

import odd_layouts
import plugin_answers
import pytest
import torch

import qcore
import qcore_vulkan
from qcore_vulkan import plugin


@pytest.mark.parametrize("contract", ["linear", "conv2d", "embedding"])
def test_every_tensor_may_lie_in_any_way(contract):
    served, wrong = odd_layouts.wrong_layouts(contract, odd_layouts.offered_by(plugin), seed=1, count=40)
    assert served >= 12
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("together", [False, True])
def test_indices_of_any_strides(dtype, together):
    with qcore.using("vulkan", strict=True):
        table = qcore.nn.QuantizedEmbedding.from_float(torch.nn.Embedding(20, 32), "w8a16")
    look_up = qcore_vulkan.sequential(table, torch.nn.ReLU()) if together else table
    dense = table.weight.dequantize()
    one = torch.tensor([7], dtype=dtype)
    pairs = torch.arange(12, dtype=dtype).view(6, 2)
    for indices in (one.expand(5), one.expand(3, 4), pairs[:, 1], pairs.t(), pairs[::2, 1], pairs[1:]):
        expected = dense[indices.long()]
        found = look_up(indices).detach()
        torch.testing.assert_close(found, expected.relu() if together else expected)


def test_a_bias_and_its_opposite_in_the_same_memory():
    with qcore.using("vulkan", strict=True):
        layer = qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(32, 16), "w8a16")
    bias, x = torch.randn(16), torch.zeros(2, 32)
    with torch.no_grad():
        for values in (bias, torch._neg_view(bias), torch.randn(1).expand(16), torch.randn(32)[::2]):
            layer.bias = torch.nn.Parameter(values, requires_grad=False)
            assert torch.equal(layer(x)[1], values.resolve_neg())


def test_answers_are_plain_values():
    assert not list(plugin_answers.faults(plugin, lambda contract: getattr(plugin, f"qcore_{contract}")))


def test_results_are_each_their_own():
    torch.manual_seed(0)
    with qcore.using("vulkan", strict=True):
        layer = qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(32, 16), "w8a16")
        conv = qcore.nn.QuantizedConv2d.from_float(torch.nn.Conv2d(4, 8, 3), "w8a8")
        table = qcore.nn.QuantizedEmbedding.from_float(torch.nn.Embedding(20, 32), "w8a16")
    chain = qcore_vulkan.sequential(layer, torch.nn.ReLU())
    inputs = [torch.randn(3, 32), torch.randn(1, 4, 5, 5), torch.arange(4), torch.randn(3, 32)]
    with torch.no_grad():
        for call, x in zip((layer, conv, table, chain), inputs, strict=True):
            first, again = call(x), call(x)
            kept = first.clone()
            again.fill_(9)
            other = call(x.flip(-1))
            assert torch.equal(first, kept)
            assert torch.equal(call(x), kept)
            assert len({y.data_ptr() for y in (first, again, other)}) == 3
