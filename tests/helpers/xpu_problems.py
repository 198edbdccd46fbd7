"""Problems for the kernels of qcore-xpu, served by their stand-in on CPU tensors."""

from __future__ import annotations

import linear_problems
import torch

from qcore import Format, QTensor, ZeroPoint

NARROW = [torch.bfloat16, torch.float16]


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
    linear_problems.assert_right(problem, result(problem) if y is None else y)


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
