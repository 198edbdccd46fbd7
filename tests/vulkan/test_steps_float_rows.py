"""Normalizations, softmax and reductions of strided operands, against torch."""

from __future__ import annotations

import math

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from float_steps import run
from torch.nn import functional as F
from vulkan_problems import vulkan  # noqa: F401

from qcore_vulkan.steps.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm, softmax

SHAPES = [(3, 64), (2, 5, 33), (1, 1), (7, 3), (4, 1000), (576,)]
VIEWS = {
    "contiguous": lambda x: x,
    "heads": lambda x: x.unflatten(-1, (3, -1)).transpose(-3, -2) if x.dim() > 1 and x.shape[-1] % 3 == 0 else x,
    "transposed": lambda x: x.transpose(0, -1),
    "part": lambda x: x[..., : max(1, x.shape[-1] - 2)],
}
PROFILES = ["cpu", "gpu"]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 3 + 0.5


@pytest.fixture(params=PROFILES)
def either(request, vulkan, monkeypatch):  # noqa: F811
    """The device, with the workgroups of CPUs and those of GPUs."""
    monkeypatch.setattr(vulkan, "profile", request.param)
    return vulkan


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_normalizations(either, shape, view):
    x = VIEWS[view](drawn(*shape))
    weight, bias = drawn(x.shape[-1]), drawn(x.shape[-1], 1).squeeze(1)
    wide, size = x.double(), x.shape[-1:]
    cases = (
        (run(either, rms_norm, x, weight, 1e-5), F.rms_norm(wide, size, weight.double(), 1e-5)),
        (run(either, rms_norm, x, None, 1e-6), F.rms_norm(wide, size, None, 1e-6)),
        (
            run(either, layer_norm, x, weight, bias, 1e-5),
            F.layer_norm(wide, size, weight.double(), bias.double(), 1e-5),
        ),
        (run(either, layer_norm, x, None, None, 1e-5), F.layer_norm(wide, size, None, None, 1e-5)),
    )
    for got, expected in cases:
        assert torch.allclose(got.double(), expected, rtol=1e-6, atol=2e-5 if x.shape[-1] == 2 else 2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_normalizations_of_sums(either, shape):
    x, residual = drawn(*shape), drawn(*reversed(shape)).permute(*reversed(range(len(shape))))
    weight, size = drawn(x.shape[-1]), x.shape[-1:]
    y, total = run(either, add_rms_norm, x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.allclose(y, F.rms_norm(total, size, weight, 1e-5), rtol=1e-6, atol=2e-6)
    y, total = run(either, add_layer_norm, x, residual, weight, None, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.allclose(y, F.layer_norm(total, size, weight, None, 1e-5), rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax(either, shape, view, log):
    x = VIEWS[view](drawn(*shape) * 5)
    expected = (F.log_softmax if log else F.softmax)(x.double(), -1)
    assert torch.allclose(run(either, softmax, x, log).double(), expected, rtol=5e-6, atol=2e-6 if log else 1e-30)


def test_softmax_of_values_that_are_not_finite(either):
    x = drawn(6, 9)
    x[0, 3], x[1, 2], x[2, 1], x[3] = math.nan, math.inf, -math.inf, -math.inf
    x[4, :8] = -math.inf
    got, expected = run(either, softmax, x), F.softmax(x, -1)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.allclose(got[[2, 4, 5]], expected[[2, 4, 5]], rtol=1e-6, atol=0)


def test_rows_that_are_not_finite_spoil_no_others(either):
    x = drawn(4, 20)
    x[1, 7], x[2, 9] = math.nan, math.inf
    got, expected = run(either, rms_norm, x, None, 1e-5), F.rms_norm(x, (20,), None, 1e-5)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.allclose(got[[0, 3]], expected[[0, 3]], rtol=1e-6)
