"""oneDNN's int8 convolution, and the plain one beyond the contract's cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import qcore
from qcore.contracts import CONTRACTS, conv2d
from qcore.contracts.inputs import Draw
from qcore.errors import FormatError
from qcore.fallback import cpu_conv2d
from qcore.schemes import Scheme


@pytest.fixture
def case(tools):
    def make(scheme, shape="3x3", dtype=torch.float32, **changes):
        draw = Draw(torch.Generator().manual_seed(1))
        shape = next(s for s in conv2d._SHAPES if s.name == shape)
        request = conv2d._request(draw.fill(Scheme.parse(scheme)), torch.device("cpu"), dtype, shape)
        request = replace(request, **changes)
        return conv2d._problem(draw, request, shape), tools.offers(request)

    return make


@pytest.mark.parametrize("scheme", ["w8a8-static", "w8a8-static-o8"])
@pytest.mark.parametrize("shape", ["3x3", "3x3-odd", "grouped", "depthwise", "channels-last", "1x1-strided"])
def test_codes_may_come_in(tools, case, scheme, shape):
    problem, _ = case(scheme, shape)
    request = replace(problem.request, x_dtype=torch.int8)
    x = torch.randint(-128, 128, problem.x.shape, dtype=torch.int8)
    for kernel in tools.offers(request).values():
        tools.check(kernel, replace(problem, request=request, x=x))


@pytest.mark.parametrize("scheme", ["w8a8-static", "w8a16", "w4a8-g32-asym"])
def test_another_channel_count_is_an_error(case, scheme):
    problem, kernels = case(scheme)
    for kernel in kernels.values():
        packed = kernel.pack(problem.weight)
        for x in (problem.x[:, :2], problem.x[0]):
            with pytest.raises(FormatError, match="IC=4"):
                kernel(x, packed, None)


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8-static", "w8a8"])
def test_compiled_for_every_batch(tools, case, scheme):
    problem, kernels = case(scheme, dtype=torch.bfloat16)
    for kernel in kernels.values():
        packed = kernel.pack(problem.weight)
        torch._dynamo.reset()
        compiled = torch.compile(kernel, fullgraph=True, dynamic=True, backend="aot_eager")
        for batch in (2, 5):
            x = torch.randn(batch, *problem.x.shape[1:]).bfloat16()
            verdict = CONTRACTS["conv2d"].judge(replace(problem, x=x), compiled(x, packed, problem.bias))
            assert verdict.ok, f"{kernel.name}: {verdict.message}"


def test_channels_last_stays(case):
    problem, kernels = case("w8a16", "channels-last")
    kernel = kernels["torch.plain.conv2d"]
    y = kernel(problem.x, kernel.pack(problem.weight), None)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_bias_of_another_dtype_and_result_of_another_dtype(tools, case):
    problem, kernels = case("w8a16", dtype=torch.bfloat16)
    for kernel in kernels.values():
        tools.check(kernel, replace(problem, bias=problem.bias.float()))
    problem, kernels = case("w8a8-static", out_dtype=torch.float16)
    for kernel in kernels.values():
        tools.check(kernel, problem)


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_autocast_changes_nothing(case, scheme):
    problem, kernels = case(scheme)
    kernel = kernels["torch.plain.conv2d"]
    packed = kernel.pack(problem.weight)
    expected = kernel(problem.x, packed, problem.bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(kernel(problem.x, packed, problem.bias), expected)


def test_meta(tools, case):
    problem, _ = case("w8a8-static")
    request = replace(problem.request, device=torch.device("meta"))
    (kernel,) = tools.offers(request).values()
    y = kernel(problem.x.to("meta"), kernel.pack(problem.weight.to("meta")), None)
    assert y.shape == (2, 8, 7, 6)


def test_saturating_instructions_are_found_out(tools):
    code = "from qcore.fallback import cpu_conv2d; print(cpu_conv2d.is_exact(8))"
    assert tools.python(code, ONEDNN_MAX_CPU_ISA="AVX2").split() == ["False"]


def test_without_the_op_nothing_is_offered(case, monkeypatch):
    problem, _ = case("w8a8-static")
    monkeypatch.setattr(cpu_conv2d, "is_exact", lambda bits: False)
    assert cpu_conv2d.kernel(problem.request) is None


@pytest.mark.parametrize(("padding", "dilation", "served"), [(2, 1, True), (3, 1, False), (3, 2, True), (5, 2, False)])
def test_padding_beyond_the_kernel_is_left_to_others(padding, dilation, served):
    conv = torch.nn.Conv2d(1, 8, 3, padding=padding, dilation=dilation)
    with qcore.using("torch"):
        layer = qcore.nn.QuantizedConv2d.from_float(conv, "w8a8-static(0.05,3)")
    assert (layer.decision.kernel.name == "torch.cpu.conv2d") is served
