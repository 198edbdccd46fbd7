"""Weights with an order: x is permuted in front of this plugin's kernels."""

import torch

import qcore


def test_kernels_get_x_in_the_stored_order():
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(128, generator=generator)
    dense = torch.randn(48, 128, generator=generator)
    weight = qcore.quantize(dense[:, order], "int4-g32-asym/plain").derived(order=order.int())
    x = torch.randn(5, 128, generator=generator)
    with qcore.using("xla", strict=True):
        layer = qcore.nn.QuantizedLinear.from_qtensor(weight)
        torch.testing.assert_close(layer(x), x @ weight.dequantize().t(), rtol=1e-4, atol=1e-4)
    assert layer.decision.plugin == "xla"
    assert torch.equal(layer.weight.order, weight.order)
