"""oneDNN's int8 convolution, and the plain one beyond the contract's cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qcore.errors import FormatError
from qcore.fallback import cpu_conv2d


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
    assert "missing" in cpu_conv2d.why_not(problem.request)


NARROW = [  # kernel, stride, padding, dilation, width; channels in, out, groups
    ((2, 1, 1, 2, 1), (4, 6, 1)),
    ((2, 1, 1, 3, 2), (4, 6, 1)),
    ((1, 2, 1, 2, 1), (4, 6, 1)),
    ((2, 3, 4, 3, 2), (16, 16, 1)),
    ((3, 1, 3, 1, 5), (1, 8, 1)),
    ((3, 1, 5, 2, 5), (1, 8, 1)),
    ((1, 1, 1, 1, 3), (16, 16, 16)),
    ((4, 2, 0, 1, 5), (2, 4, 2)),
    ((3, 3, 1, 1, 2), (8, 16, 8)),
    ((4, 2, 1, 1, 3), (1, 16, 1)),
    ((3, 1, 0, 1, 5), (2, 80, 2)),
]
"""Where results see padding alone, or a stride above 1 leaves one result."""

CONVOLVE = """
import sys, torch, qcore
from qcore.fallback import onednn
torch.set_num_threads(1)

def check(k, s, p, d, size, ic, oc, groups, across, dtype):
    def pick(narrow, wide):
        return (wide, narrow) if across else (narrow, wide)
    geometry = dict(stride=pick(s, 1), padding=pick(p, 1), dilation=pick(d, 1), groups=groups)
    conv = torch.nn.Conv2d(ic, oc, pick(k, 2), dtype=dtype, **geometry)
    x = torch.randn(2, ic, *pick(size, 6)).to(dtype)
    codes = torch.clamp(torch.round(x.float() / 0.05) + 3, -128, 127) - 3
    fast = "plain" if 1 < ic == groups < oc or not onednn.is_exact(8) else "cpu"
    for scheme, seen, served in ("w8a8-static(0.05,3)", codes.double() * 0.05, fast), ("w8a16", x.double(), "plain"):
        layer = qcore.nn.QuantizedConv2d.from_float(conv, scheme)
        assert layer.decision.kernel.name == f"torch.{served}.conv2d", layer.decision
        w = layer.weight.dequantize(torch.float64).view(oc, *conv.kernel_size, -1).permute(0, 3, 1, 2)
        expected = torch.nn.functional.conv2d(seen, w.contiguous(), conv.bias.double(), **geometry)
        for image in (x, x.contiguous(memory_format=torch.channels_last)):
            y = layer(image)
            worst = float((y.double() - expected).abs().max())
            assert worst < (1e-4 if dtype == torch.float32 else 0.1), (scheme, worst)

with qcore.using("torch", verify="off"), torch.no_grad():
    for axis, channels in eval(sys.argv[1]):
        for across, dtype in (True, torch.float32), (False, torch.float32), (True, torch.bfloat16):
            print(axis, channels, across, dtype, flush=True)
            check(*axis, *channels, across, dtype)
"""


def test_narrow_images(tools):
    assert tools.python(CONVOLVE, arguments=[repr(NARROW)]).count("\n") == 3 * len(NARROW)
