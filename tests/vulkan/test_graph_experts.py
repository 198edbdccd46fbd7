"""Grouped linear layers (experts) as steps of programs."""

import gc
from dataclasses import replace

import pytest
import torch
from graph_backends import part_of
from parallel_models import experts
from torch import nn
from torch.nn import functional as F
from vulkan_problems import vulkan  # noqa: F401

import qcore
from qcore import graphs
from qcore.plugin_api import Role
from qcore_vulkan.graphs.backend import qcore_vulkan
from qcore_vulkan.graphs.lowering import halves
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


def by_expert(x, weight, ends):
    """What the op of transformers computes; rows of no expert give 0."""
    y, start = x.new_zeros(len(x), weight.shape[2]), 0
    for one, end in zip(weight, ends.tolist(), strict=True):
        y[start:end] = x[start:end] @ one
        start = end
    return y


@pytest.fixture
def fallback():
    """The op that transformers defines for rows sorted by expert, as torch compiles its own for bfloat16 only."""
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        yield
        return
    with torch.library._scoped_library("transformers", "FRAGMENT") as library:
        library.define("grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor")
        library.impl("grouped_mm_fallback", by_expert, "CPU")
        library.impl("grouped_mm_fallback", lambda x, weight, _: x.new_empty(len(x), weight.shape[2]), "Meta")
        yield


def grouped_mm(x, weight, ends):
    """The product as transformers calls it; torch's own by the name that this torch has for it."""
    if x.dtype != torch.bfloat16:
        return torch.ops.transformers.grouped_mm_fallback(x, weight, offs=ends)
    return (getattr(F, "grouped_mm", None) or torch._grouped_mm)(x, weight, offs=ends)


class FloatMixture(nn.Module):
    """A mixture of experts as transformers computes it, of float weights: two experts of five for each token."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 5)
        self.up, self.down = (nn.Parameter(torch.randn(5, *size) / 6) for size in ((96, 32), (32, 48)))

    def forward(self, x):
        shares, chosen = self.router(x).softmax(-1).topk(2)
        experts, order = chosen.reshape(-1).sort()
        counts = torch.histc(experts.float(), bins=5, min=0, max=4)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = grouped_mm(x[order // 2], self.up.transpose(1, 2), ends).chunk(2, -1)
        y = grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), ends) * shares.reshape(-1)[order].unsqueeze(1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return y[back].view(len(x), 2, -1).sum(1)


@torch.no_grad()
@pytest.mark.usefixtures("fallback")
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_of_floats_is_one_program(vulkan, monkeypatch, dtype, profile):  # noqa: F811
    monkeypatch.setattr(vulkan, "profile", profile)
    torch.manual_seed(2)
    model = FloatMixture().eval().to(dtype)
    for rows in (1, 9, 70):
        x = torch.randn(rows, 32).to(dtype)
        found, expected = torch.compile(model, backend=qcore_vulkan)(x), model(x)
        assert (found.float() - expected.float()).norm() <= (3e-2 if dtype != torch.float32 else 1e-5) * expected.norm()
        explained = graphs.explain(model)
        assert not explained.host
        assert {len(report.parts) for report in explained.reports} == {1}


@torch.no_grad()
@pytest.mark.usefixtures("fallback")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_float_rows_by_their_ends(vulkan, monkeypatch, profile, dtype):  # noqa: F811
    monkeypatch.setattr(vulkan, "profile", profile)
    torch.manual_seed(3)
    weight = torch.randn(4, 24, 40).to(dtype)
    compiled = torch.compile(grouped_mm, backend=qcore_vulkan)
    for ends in ([3, 3, 10, 33], [0, 0, 0, 33], [33, 33, 33, 33], [1, 2, 3, 4], [0, 0, 0, 0]):
        x, last = torch.randn(33, 24).to(dtype), ends[-1]
        parts = zip([0, *ends], ends, weight.double(), strict=False)
        expected = torch.cat([x[start:end].double() @ one for start, end, one in parts])
        found = compiled(x, weight, torch.tensor(ends, dtype=torch.int32))
        rounding = {torch.float32: 2.0**-18, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
        bound = x[:last].double().abs() @ weight.double().abs().amax(0) * rounding
        assert ((found[:last].double() - expected).abs() <= bound).all()
        assert not found[last:].any()
    with pytest.raises(IndexError):
        compiled(x, weight, torch.tensor([3, 2, 4, 33], dtype=torch.int32))


def test_float_weights_keep_their_16_bits():
    with torch._subclasses.FakeTensorMode():
        x, weight = torch.zeros(9, 32), torch.zeros(5, 48, 32, dtype=torch.bfloat16)
        ends = torch.zeros(5, dtype=torch.int32)
        part = part_of(lambda x, w, e: grouped_mm(x.bfloat16(), w.transpose(1, 2), e), x, weight, ends)
    static = replace(part, inputs=tuple(replace(one, role=Role.STATIC) for one in part.inputs))
    assert halves(static) == {part.inputs[1].name}


@torch.no_grad()
@pytest.mark.parametrize(("bins", "low", "high"), [(5, 0, 4), (4, -1.5, 2.5), (100, 0, 1), (1, -1, 1), (7, 3, 1000)])
def test_histograms(bins, low, high):
    compiled = torch.compile(lambda x: torch.histc(x, bins=bins, min=low, max=high), backend=qcore_vulkan)
    ends = torch.tensor([low, high, low - 1e-3, high + 1e-3, high - 1e-3])
    for x in (torch.arange(-3, 9).float(), torch.linspace(-2, 3, 301), torch.randn(7, 11) * 3, ends):
        assert torch.equal(compiled(x), torch.histc(x, bins=bins, min=low, max=high))


def test_what_stays_on_the_host():
    with torch._subclasses.FakeTensorMode():
        x = torch.zeros(16, 16)
        part = part_of(lambda x: torch.histc(x, bins=4), x)
        (why,) = filter(None, map(why_not, part.nodes))
        assert "pass min and max" in why
        part = part_of(lambda x: torch.histc(x, bins=1 << 17, min=0, max=1), x)
        (why,) = filter(None, map(why_not, part.nodes))
        assert "compares each element with each bin" in why
        part = part_of(lambda x, e: grouped_mm(x, x, e), x.bfloat16(), torch.zeros(2, dtype=torch.int32))
        (why,) = filter(None, map(why_not, part.nodes))
        assert "rows that ends part" in why
