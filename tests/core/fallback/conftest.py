"""What the tests of the fallback share: problems for a scheme, and the kernels that are offered for them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from contract_problems import one_thread  # noqa: F401

import qcore
from qcore.contracts import CONTRACTS
from qcore.contracts.inputs import Draw, Shape
from qcore.fallback import plugin
from qcore.weights.schemes import Scheme

LINEAR = CONTRACTS["linear"]


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
    parts = zip((left.data, left.scale, left.zero), (right.data, right.scale, right.zero), strict=True)
    equal = all((a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in parts)
    return equal and left.shape == right.shape and left.format == right.format


def python(code, *, arguments=(), **environment):
    """Run ``code`` in a process of its own and give back what it printed."""
    source = str(Path(qcore.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def tools():
    return SimpleNamespace(offers=offers, linear=linear, check=check, same=same, python=python)
