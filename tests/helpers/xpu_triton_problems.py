"""Problems for the Triton kernels of qcore-xpu, run in Triton's interpreter and held against the contracts."""

from __future__ import annotations

import linear_problems
import torch

from qcore.contracts import CONTRACTS

CPU = torch.device("cpu")


def linear_problem(scheme, m, n, k, dtype=torch.float32, bias="none", **kind):
    """As `linear_problems.linear_problem`, in float32 unless said otherwise."""
    return linear_problems.linear_problem(scheme, m, n, k, dtype, bias, **kind)


def _module_of(request):
    from qcore_xpu import conv2d, embedding, triton_linear

    return {"linear": triton_linear, "conv2d": conv2d, "embedding": embedding}[request.contract]


def why_not(request):
    """Why the plugin has no kernel in Triton for a request of any contract; empty if it has one."""
    return _module_of(request).why_not(request)


def kernel_for(request):
    """The plugin's kernel in Triton for a request of any contract."""
    assert not why_not(request), why_not(request)
    return _module_of(request).kernel(request)


def check(problem):
    """Run the kernel, hold its result against the contract, and give it back."""
    kernel = kernel_for(problem.request)
    result = kernel(problem.x, kernel.pack(problem.weight), problem.bias, **problem.given)
    verdict = CONTRACTS[problem.request.contract].judge(problem, result)
    assert verdict.ok, verdict.message
    return result
