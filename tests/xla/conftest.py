"""Tests run on XLA's CPU backend, with few shapes and forms: compiling costs, and the conformance kit has them all."""

from __future__ import annotations

import importlib.util

import isolation
import pytest
import torch

from qcore.contracts import CONTRACTS
from qcore.weights.schemes import Scheme

if importlib.util.find_spec("qcore_xla") is None or importlib.util.find_spec("jax") is None:
    collect_ignore_glob = ["*"]


@pytest.fixture(autouse=True)
def isolated(tmp_path_factory):
    """No settings from outside, and a cache of the session's own."""
    with isolation.isolated(tmp_path_factory.getbasetemp() / "cache"):
        yield


@pytest.fixture
def problem():
    """A problem of the contract `linear` by scheme: N = 20, K = 77 unless said otherwise."""

    def make(scheme, rows=3, n=20, k=77, bias="none", dtype=torch.float32):
        from qcore.contracts.inputs import Draw, Shape

        draw = Draw(torch.Generator().manual_seed(0))
        filled = draw.fill(Scheme.parse(scheme))
        request = CONTRACTS["linear"].request_for(filled, torch.device("cpu"), dtype, n, k)
        return draw.linear(request, Shape("here", (rows,), n, k, bias=bias))

    return make
