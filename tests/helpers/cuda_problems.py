"""Linear problems for the kernels of qcore-cuda, and their weights packed."""

from __future__ import annotations

from dataclasses import replace

import torch

from qcore import Scheme
from qcore.contracts import LINEAR
from qcore.contracts.inputs import Draw, Shape


def linear_problem(scheme, m, n, k, dtype=torch.bfloat16, bias="none", **kind):
    """A problem of the contract with random numbers; ``kind``: as `Shape` takes it."""
    draw = Draw(torch.Generator().manual_seed(m * 7 + n))
    filled = draw.fill(Scheme.parse(scheme))
    request = LINEAR.request_for(filled, torch.device("cpu"), dtype, n, k)
    shape = Shape("case", (m,), n, k, bias=bias, **kind)
    return draw.linear(replace(request, bias=bias != "none"), shape, filled.quantizer, dtype)


def packed_weight(problem, sums=False, units=False):
    """The plugin's `Weight` of a problem, and the sums of its codes, if wanted."""
    from qcore_triton import packing

    form, parts = problem.weight.format, packing.pack(problem.weight, sums=sums, units=units)
    n, k = problem.request.n, problem.request.k
    return packing.weight_of(parts, form, n, k)._replace(units=parts.get("units")), parts.get("sums")


def float_product(case, weight, product, config, device=None):
    """The result of a float product of `qcore_cuda.products` with a given configuration, called as it is planned."""
    from qcore_cuda import weight_only

    plan = weight_only.plan(case.x, weight, case.request.out_dtype)
    return product.launch(case.x, weight, case.bias, device or plan.device, plan.problem, config)


def assert_right(problem, result):
    """Hold a result against the contract."""
    verdict = LINEAR.judge(problem, result)
    assert verdict.ok, verdict.message
