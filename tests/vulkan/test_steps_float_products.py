"""Products of float matrices of any strides, against torch in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from float_steps import Runner, run
from torch import Tensor
from vulkan_problems import vulkan  # noqa: F401

from qcore_vulkan.steps.products import dense, matmul


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


@pytest.fixture(params=["cpu", "gpu", "old gpu"])
def either(request, vulkan, monkeypatch):  # noqa: F811
    """The device, with the kernels of CPUs, those of GPUs, and those of GPUs with small workgroups."""
    monkeypatch.setattr(vulkan, "profile", request.param[-3:])
    if "old" in request.param:
        limits = dataclasses.replace(vulkan.description.limits, max_invocations=128)
        monkeypatch.setattr(vulkan, "description", dataclasses.replace(vulkan.description, limits=limits))
    return vulkan


def assert_close(got: Tensor, expected: Tensor, k: int) -> None:
    assert torch.allclose(got.double(), expected, rtol=1e-6, atol=3e-7 * k**0.5 * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 9, 33), (1, 70, 256), (3, 1, 8), (7, 65, 100), (1, 1, 1), (40, 130, 48)])
def test_layers_with_float_weights(either, shape, dtype):
    m, n, k = shape
    x, weight, bias = drawn(m, k), drawn(n, k, seed=1).to(dtype), drawn(n)
    assert_close(run(either, dense, x, weight, bias), x.double() @ weight.double().t() + bias, k)
    assert_close(run(either, dense, x[0], weight, None), x[0].double() @ weight.double().t(), k)


def test_inputs_of_other_shapes_and_strides(either):
    weight, bias = drawn(20, 12), drawn(40)[::2]
    for x in (
        drawn(2, 3, 5, 12),
        drawn(4, 6, 12)[:, 1:3],
        drawn(12, 7).t(),
        drawn(1, 12).expand(5, 12),
        drawn(4, 3, 12)[:, 0],
    ):
        assert_close(run(either, dense, x, weight, bias), x.double() @ weight.double().t() + bias, 12)
    assert_close(run(either, dense, drawn(5, 6), drawn(6, 9).t(), None), drawn(5, 6).double() @ drawn(6, 9).double(), 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_larger_than_a_binding(either, monkeypatch, dtype):
    x, weight, bias = drawn(3, 6), drawn(700, 6).to(dtype), drawn(700)
    limits = dataclasses.replace(either.description.limits, max_storage_range=24 * 150)
    monkeypatch.setattr(either, "description", dataclasses.replace(either.description, limits=limits))
    assert_close(run(either, dense, x, weight, bias), x.double() @ weight.double().t() + bias, 6)
    with pytest.raises(ValueError, match="must be contiguous"):
        run(either, dense, x, drawn(6, 700).t(), bias)


MATRICES = {
    "plain": lambda: (drawn(5, 9), drawn(9, 7)),
    "batch": lambda: (drawn(3, 5, 8), drawn(3, 8, 40)),
    "scores": lambda: (drawn(2, 7, 3, 16).transpose(1, 2), drawn(2, 9, 3, 16).permute(0, 2, 3, 1)),
    "transposed": lambda: (drawn(3, 8, 5).transpose(1, 2), drawn(3, 6, 8).transpose(1, 2)),
    "broadcast": lambda: (drawn(2, 1, 4, 8), drawn(3, 8, 5)),
    "four batches": lambda: (drawn(2, 3, 2, 3, 4, 8).permute(2, 0, 3, 1, 4, 5), drawn(2, 2, 3, 3, 8, 2)),
    "one row": lambda: (drawn(4, 1, 64), drawn(4, 64, 50)),
    "one column": lambda: (drawn(50, 64), drawn(64, 1)),
    "large": lambda: (drawn(150, 70), drawn(70, 140)),
}


@pytest.mark.parametrize("name", MATRICES)
def test_batches_of_matrices(either, name):
    a, y = MATRICES[name]()
    assert_close(run(either, matmul, a, y), a.double() @ y.double(), a.shape[-1])


def test_results_in_given_memory(either):
    a, y, weight = drawn(3, 5, 8), drawn(3, 8, 6), drawn(10, 6)
    runner = Runner(either)
    whole = runner.output((3, 6, 15), torch.float32)
    part = whole.slice(2, 5, 5).transpose(1, 2)
    matmul(runner.b, runner.operand(a), runner.operand(y), part)
    assert_close(runner.read(part)[0], a.double() @ y.double(), 8)
    runner = Runner(either)
    whole = runner.output((7, 15), torch.float32)
    rows = whole.slice(1, 3, 10)
    dense(runner.b, runner.operand(drawn(7, 6)), runner.operand(weight), None, rows)
    assert_close(runner.read(rows)[0], drawn(7, 6).double() @ weight.double().t(), 6)


def test_long_rows_stay_accurate(either):
    x, weight = drawn(2, 20000).abs(), drawn(5, 20000).abs()
    expected = x.double() @ weight.double().t()
    assert torch.allclose(run(either, dense, x, weight, None).double(), expected, rtol=3e-6)


def test_rows_that_are_not_finite_spoil_no_others(either):
    x, weight = drawn(4, 20), drawn(9, 20)
    x[1, 3], x[2, 4] = torch.nan, torch.inf
    got = run(either, dense, x, weight, None)
    assert got[[0, 3]].isfinite().all()
    assert got[1].isnan().all()
    assert not got[2].isfinite().any()
