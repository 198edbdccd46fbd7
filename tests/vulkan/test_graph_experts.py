"""Grouped linear layers (experts) as steps of programs."""

import gc

import pytest
import torch
from graph_backends import part_of

import qcore
from qcore import graphs
from qcore_vulkan.graphs.backend import qcore_vulkan
from qcore_vulkan.graphs.support import why_not


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer_of(scheme, biased=True, experts=3):
    torch.manual_seed(0)
    weight, bias = torch.randn(experts, 20, 64), torch.randn(experts, 20) if biased else None
    return qcore.nn.QuantizedGroupedLinear.from_float(weight, scheme, bias=bias)


ENDS = ([2, 2, 5], [0, 0, 0], [0, 7, 7], [1, 2, 6])
"""Experts without rows, and rows of no expert, which give 0 exactly."""


@torch.no_grad()
@pytest.mark.parametrize(("scheme", "biased"), [
    ("w4a16-g32", True), ("w8a16", False), ("w8a8", True), ("w4a8-g32-asym-aasym", False),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts(scheme, biased, dtype):
    layer = layer_of(scheme, biased).to(dtype)
    compiled, x = torch.compile(layer, backend=qcore_vulkan), torch.randn(7, 64).to(dtype)
    weight = layer.weight.dequantize(torch.float64)
    for ends in ENDS:
        found, offsets = compiled(x, torch.tensor(ends, dtype=torch.int32)), [0, *ends]
        expected = torch.zeros(7, 20, dtype=torch.float64)
        for e, (start, end) in enumerate(zip(offsets, ends, strict=False)):
            own = x[start:end].double() @ weight[e].T
            expected[start:end] = own + layer.bias[e].double() if biased else own
        assert found.dtype == dtype
        tolerance = 3e-2 if "a8" in scheme or dtype != torch.float32 else 1e-5
        assert (found.double() - expected).norm() <= tolerance * expected.norm()
    assert not graphs.explain(layer).host


@torch.no_grad()
def test_experts_with_an_order_of_columns():
    each = [qcore.quantize(torch.randn(12, 64), "int4-g32") for _ in range(2)]
    ordered = [one.derived(order=torch.randperm(64).to(torch.int32)) for one in each]
    layer, x = qcore.nn.QuantizedGroupedLinear.from_qtensor(qcore.QTensor.stack(ordered)), torch.randn(4, 64)
    ends = torch.tensor([1, 4], dtype=torch.int32)
    found = torch.compile(layer, backend=qcore_vulkan)(x, ends)
    torch.testing.assert_close(found, layer(x, ends), rtol=1e-4, atol=1e-4)
    assert not graphs.explain(layer).host


@torch.no_grad()
def test_their_memory_is_freed_with_the_layer(device):
    gc.collect()
    before, layer = device.stats().bytes, layer_of("w8a16")
    torch.compile(layer, backend=qcore_vulkan)(torch.randn(4, 64), torch.tensor([1, 2, 4], dtype=torch.int32))
    assert device.stats().bytes > before
    torch._dynamo.reset()
    del layer
    gc.collect()
    assert device.stats().bytes <= before


@pytest.mark.parametrize(("experts", "reason"), [(32, ""), (33, "33 experts are more than the 32")])
def test_many_experts_stay_on_the_host(experts, reason):
    def call(x, ends, weight):
        return torch.ops.qcore_graph.grouped_linear(x, ends, weight, None, "w8a16", 8, torch.float32)

    with torch._subclasses.FakeTensorMode():
        part = part_of(call, torch.zeros(2, 16), torch.zeros(experts, dtype=torch.int32), torch.zeros(1))
    (why,) = map(why_not, part.nodes)
    assert why.startswith(reason)
    assert bool(why) == bool(reason)
