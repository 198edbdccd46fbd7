"""Weights with an order, for the tests of every plugin."""

import torch

import qcore


def check_order(plugin: str) -> None:
    """x is permuted in front of the plugin's kernels, and the weight keeps its order."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(128, generator=generator)
    dense = torch.randn(48, 128, generator=generator)
    weight = qcore.quantize(dense[:, order], "int4-g32-asym/plain").derived(order=order.int())
    x = torch.randn(5, 128, generator=generator)
    with qcore.using(plugin, strict=True):
        layer = qcore.nn.QuantizedLinear.from_qtensor(weight)
        torch.testing.assert_close(layer(x), x @ weight.dequantize().t(), rtol=1e-4, atol=1e-4)
    assert layer.decision.plugin == plugin
    assert torch.equal(layer.weight.order, weight.order)
