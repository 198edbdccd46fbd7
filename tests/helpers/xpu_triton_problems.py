"""Problems for the Triton kernels of qcore-xpu, run in Triton's interpreter and held against the contracts."""

from __future__ import annotations

from dataclasses import replace

import torch

from qcore import Scheme
from qcore.contracts import CONTRACTS
from qcore.contracts.inputs import Draw, Shape

CPU = torch.device("cpu")


def linear_problem(scheme, m, n, k, dtype=torch.float32, bias="none", seed=0, **kind):
    """A problem of the contract with random numbers; ``kind``: as `Shape` takes it."""
    draw = Draw(torch.Generator().manual_seed(seed + m * 7 + n + k))
    filled = draw.fill(Scheme.parse(scheme))
    request = CONTRACTS["linear"].request_for(filled, CPU, dtype, n, k)
    shape = Shape("case", (m,), n, k, bias=bias, **kind)
    return draw.linear(replace(request, bias=bias != "none"), shape, filled.quantizer, dtype)


def kernel_for(request):
    """The plugin's kernel in Triton for a request of any contract; a text where it has none."""
    from qcore_xpu import conv2d, embedding, triton_linear

    return {"linear": triton_linear, "conv2d": conv2d, "embedding": embedding}[request.contract].kernel(request)


def check(problem):
    """Run the kernel, hold its result against the contract, and give it back."""
    kernel = kernel_for(problem.request)
    assert not isinstance(kernel, str), kernel
    result = kernel(problem.x, kernel.pack(problem.weight), problem.bias, **problem.given)
    verdict = CONTRACTS[problem.request.contract].judge(problem, result)
    assert verdict.ok, verdict.message
    return result
