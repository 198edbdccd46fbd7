"""Problems for the kernels of qcore-xpu, served by their stand-in on CPU tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from qcore import Format, QTensor, Scheme, ZeroPoint
from qcore.contracts import LINEAR
from qcore.contracts.inputs import Draw, Shape

NARROW = [torch.bfloat16, torch.float16]


def linear_problem(scheme, m, n, k, dtype=torch.bfloat16, *, bias="none", seed=0, **kind):
    """A problem of the contract with random numbers; ``kind``: as `Shape` takes it."""
    draw = Draw(torch.Generator().manual_seed(seed * 1009 + m * 7 + n))
    filled = draw.fill(Scheme.parse(scheme))
    request = LINEAR.request_for(filled, torch.device("cpu"), dtype, n, k)
    shape = Shape("case", (m,), n, k, bias=bias, **kind)
    return draw.linear(replace(request, bias=bias != "none"), shape, filled.quantizer, dtype)


def kernel_for(problem):
    """The kernel of `qcore_xpu.linear` for a problem."""
    from qcore_xpu import linear

    kernel = linear.kernel(problem.request)
    assert isinstance(kernel, linear.AtenLinear)
    return kernel


def result(problem):
    """What the kernel makes of a problem."""
    kernel = kernel_for(problem)
    return kernel(problem.x, kernel.pack(problem.weight), problem.bias, **problem.given)


def assert_right(problem, y=None):
    """Hold a result, or that of the kernel, against the contract."""
    verdict = LINEAR.judge(problem, result(problem) if y is None else y)
    assert verdict.ok, verdict.message


def random_weight(n, k, form, *, scale_dtype=torch.float32, seed=0):
    """A weight of random codes, scales and zero points in format ``form``, a text."""
    generator = torch.Generator().manual_seed(seed)
    fmt = Format.parse(form)
    low, high = fmt.code_range
    codes = torch.randint(low, high + 1, (n, k), generator=generator).to(torch.int8)
    groups = (fmt.groups(k), n)
    scale = (torch.rand(groups, generator=generator) * 0.02 + 0.002).to(scale_dtype)
    zero = None
    if fmt.zero is ZeroPoint.INT:
        zero = torch.randint(low, high + 1, groups, generator=generator).to(torch.int8)
    elif fmt.zero is ZeroPoint.FLOAT:
        zero = (torch.randn(groups, generator=generator) * 0.05).to(scale_dtype)
    return QTensor.from_codes(codes, scale, zero, fmt)
