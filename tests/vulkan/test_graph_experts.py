"""Grouped linear layers (experts) as steps of programs."""

import gc

import pytest
import torch
from graph_backends import part_of
from parallel_models import experts
from torch import nn

import qcore
from qcore import graphs
from qcore_vulkan.graphs.backend import qcore_vulkan
from qcore_vulkan.graphs.support import why_not

pytestmark = pytest.mark.usefixtures("fresh_compiler")


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
@pytest.mark.parametrize("bound_to", ["torch", "vulkan"])
def test_experts_with_an_order_of_columns(bound_to):
    torch.manual_seed(0)
    each = [qcore.quantize(torch.randn(12, 64), "int4-g32") for _ in range(2)]
    ordered = [one.derived(order=torch.randperm(64).to(torch.int32)) for one in each]
    with qcore.using(bound_to):
        layer, x = qcore.nn.QuantizedGroupedLinear.from_qtensor(qcore.QTensor.stack(ordered)), torch.randn(4, 64)
        for ends in (torch.tensor([1, 4], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)):
            found = torch.compile(layer, backend=qcore_vulkan)(x, ends)
            torch.testing.assert_close(found, layer(x, ends), rtol=1e-4, atol=1e-4)
    assert not graphs.explain(layer).host


@torch.no_grad()
@pytest.mark.parametrize("bound_to", ["torch", "vulkan"])
def test_a_linear_layer_with_an_order_of_columns(bound_to):
    torch.manual_seed(0)
    weight = qcore.quantize(torch.randn(12, 64), "int4-g32").derived(order=torch.randperm(64).to(torch.int32))
    x = torch.randn(4, 64)
    with qcore.using(bound_to):
        layer = qcore.nn.QuantizedLinear.from_qtensor(weight)
        found = torch.compile(layer, backend=qcore_vulkan)(x)
    torch.testing.assert_close(found, x @ weight.dequantize().T, rtol=1e-4, atol=1e-4)


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


@torch.no_grad()
def test_many_experts():
    torch.manual_seed(0)
    layer = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(100, 12, 32), "w4a16-g32")
    x, ends = torch.randn(9, 32), torch.randint(0, 9, (100,)).sort().values.to(torch.int32)
    found = torch.compile(layer, backend=qcore_vulkan)(x, ends)
    torch.testing.assert_close(found, layer(x, ends), rtol=1e-4, atol=1e-4)
    assert not graphs.explain(layer).host


@torch.no_grad()
def test_a_weight_that_the_layer_has_on_the_device_is_not_copied(device):
    with qcore.using("vulkan"):
        layer = layer_of("w8a16").requires_grad_(False)
        x, ends = torch.randn(7, 64), torch.tensor([1, 1, 7], dtype=torch.int32)
        expected, before = layer(x, ends), device.stats().bytes
        found = torch.compile(layer, backend=qcore_vulkan)(x, ends)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert device.stats().bytes - before <= 4 * layer.bias.numel()


@torch.no_grad()
@pytest.mark.parametrize("bad", [[3, 1, 7], [1, 2, 8], [-1, 2, 7]], ids=str)
def test_ends_that_do_not_ascend_are_an_error(bad):
    layer, x = layer_of("w8a16"), torch.randn(7, 64)
    compiled = torch.compile(layer, backend=qcore_vulkan)
    compiled(x, torch.tensor([1, 1, 7], dtype=torch.int32))
    with pytest.raises(IndexError, match="out of range"):
        compiled(x, torch.tensor(bad, dtype=torch.int32))


def test_an_expert_larger_than_a_buffer_stays_on_the_host(monkeypatch):
    def call(x, ends, weight):
        return torch.ops.qcore_graph.grouped_linear(x, ends, weight, None, "w8a16", 4096, torch.float32)

    with torch._subclasses.FakeTensorMode():
        part = part_of(call, torch.zeros(2, 4096), torch.zeros(3, dtype=torch.int32), torch.zeros(1))
    assert not any(map(why_not, part.nodes))
    monkeypatch.setattr("qcore_vulkan.eligibility.largest_range", lambda: 1 << 23)
    (why,) = map(why_not, part.nodes)
    assert "an expert must fit into one buffer" in why


class Mixture(nn.Module):
    """A router and fused experts, three of which compute each token."""

    def __init__(self, scheme, count):
        super().__init__()
        self.router, self.experts = nn.Linear(64, count), experts(scheme, e=count)

    def forward(self, x):
        shares, chosen = self.router(x).softmax(-1).topk(3)
        return self.experts(x, chosen, shares)


@torch.no_grad()
@pytest.mark.parametrize(("scheme", "count"), [("mxfp4", 40), ("w8a8", 5)])
def test_a_mixture_is_one_program(scheme, count):
    torch.manual_seed(1)
    model = Mixture(scheme, count).eval()
    x = torch.randn(9, 64)
    found, expected = torch.compile(model, backend=qcore_vulkan)(x), model(x)
    assert (found - expected).norm() <= (2e-2 if "a8" in scheme else 1e-4) * expected.norm()
    explained = graphs.explain(model)
    assert not explained.host
    assert explained.submissions == 1
