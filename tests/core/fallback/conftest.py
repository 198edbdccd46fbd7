"""What the tests of the fallback share: problems for a scheme, and the kernels that are offered for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from processes import printed, unmeasured

import qcore
from qcore.contracts import CONTRACTS, conv2d
from qcore.contracts.inputs import Draw, Shape
from qcore.fallback import plugin
from qcore.resolving.verification import difference
from qcore.weights.quantizers import quantize
from qcore.weights.schemes import Scheme

LINEAR = CONTRACTS["linear"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def offers(request):
    """Kernels for a request, by name, best first."""
    return {offer.kernel.name: offer.kernel for offer in getattr(plugin, f"qcore_{request.contract}")(request)}


def linear(scheme, dtype=torch.float32, n=48, k=256, seed=0, **changes):
    """A plain request for a linear layer and something to draw its problems with."""
    draw = Draw(torch.Generator().manual_seed(seed))
    scheme = draw.fill(Scheme.parse(scheme))
    request = replace(LINEAR.request_for(scheme, torch.device("cpu"), dtype, n, k), **changes)
    weight = draw.weight(n, k, request.weight)

    def problem(*lead, **unusual):
        shape = Shape("test", lead, n, k, unusual.pop("bias", "none"), **unusual)
        return replace(draw.linear(request, shape, dtype=dtype), weight=weight)

    return SimpleNamespace(request=request, weight=weight, problem=problem, kernels=offers(request))


def check(kernel, problem, packed=None):
    """Run a kernel and hold the result against its contract."""
    packed = kernel.pack(problem.weight) if packed is None else packed
    contract = CONTRACTS[problem.request.contract]
    verdict = contract.judge(problem, kernel(problem.x, packed, problem.bias, **problem.given))
    assert verdict.ok, f"{kernel.name}: {verdict.message}"
    return verdict


def same(left, right):
    """Whether two QTensors hold the same bits."""
    return not difference(left, right)


def python(code, *, arguments=(), **environment):
    """Run ``code`` in a process of its own and give back what it printed."""
    source = str(Path(qcore.__file__).parents[1])
    return printed("-c", code, *arguments, env={**unmeasured(), "PYTHONPATH": source, **ONE_THREAD, **environment})


@pytest.fixture
def tools():
    return SimpleNamespace(offers=offers, linear=linear, check=check, same=same, python=python)


@pytest.fixture
def case():
    """``case("w8a8", "3x3")``: a convolution of the contract by the name of its shape, and the kernels for it."""

    def make(scheme, shape="3x3", dtype=torch.float32, **changes):
        draw = Draw(torch.Generator().manual_seed(1))
        shape = next(s for s in conv2d._SHAPES if s.name == shape)
        request = conv2d._request(draw.fill(Scheme.parse(scheme)), torch.device("cpu"), dtype, shape)
        request = replace(request, **changes)
        return conv2d._problem(draw, request, shape), offers(request)

    return make


@pytest.fixture
def table():
    """``table(Format("int4", 32))``: the kernel for an embedding, its weight packed, and the weight."""

    def make(fmt, dtype=torch.float32, v=20, d=96):
        weight = quantize(torch.randn(v, d), fmt)
        request = CONTRACTS["embedding"].request_for(Scheme(fmt), torch.device("cpu"), dtype, v, d)
        (kernel,) = offers(request).values()
        return kernel, kernel.pack(weight), weight

    return make
