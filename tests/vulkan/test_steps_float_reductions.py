"""Reductions, running sums and the largest elements of strided operands, against torch."""

from __future__ import annotations

import math

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from float_steps import Runner, run
from torch import Tensor
from vulkan_problems import vulkan  # noqa: F401

from qcore_vulkan.steps.reductions import argreduce, cumsum, reduce, topk


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(params=["cpu", "gpu"])
def either(request, vulkan, monkeypatch):  # noqa: F811
    """The device, with the workgroups of CPUs and those of GPUs."""
    monkeypatch.setattr(vulkan, "profile", request.param)
    return vulkan


OPERANDS = {
    "rows": (lambda: drawn(3, 200), [1]),
    "columns": (lambda: drawn(50, 300), [0]),
    "all": (lambda: drawn(7, 9, 11), [0, 1, 2]),
    "middle": (lambda: drawn(4, 70, 5), [1]),
    "outer": (lambda: drawn(4, 7, 5), [0, 2]),
    "image": (lambda: drawn(2, 3, 8, 9), [-1, -2]),
    "one element": (lambda: drawn(1, 1), [1]),
    "transposed": (lambda: drawn(6, 40, 3).permute(2, 0, 1)[:, ::2], [0, 2]),
    "many results": (lambda: drawn(5000, 40), [1]),
    "expanded": (lambda: drawn(5, 1).expand(5, 64), [1]),
    "apart": (lambda: drawn(3, 2, 2, 2, 3, 2).permute(5, 2, 0, 4, 1, 3)[:, :, 1:], [0, 2, 4]),
}
FUNCTIONS = {"sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "amin": torch.amin}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("operand", OPERANDS)
def test_reductions(either, operand, name):
    make, dims = OPERANDS[operand]
    x = make()
    for keepdim in (False, True):
        got = run(either, reduce, name, x, dims, keepdim)
        expected = FUNCTIONS[name](x.double(), dims, keepdim)
        assert got.shape == expected.shape
        assert torch.allclose(got.double(), expected, rtol=1e-6, atol=1e-5 if name == "sum" else 1e-7)


@pytest.mark.parametrize("name", ["sum", "amax", "amin", "prod"])
def test_reductions_of_integers(either, name):
    x = torch.randint(-9, 9, (5, 6), generator=torch.Generator().manual_seed(1))
    expected = getattr(torch, name)(x, 1)
    assert torch.equal(run(either, reduce, name, x, [1]), expected.int())


@pytest.mark.parametrize("count", [5, 100])
def test_whether_any_is_true(either, count):
    x = torch.zeros(4, count)
    x[1, count // 2], x[2, -1] = -1.0, math.nan
    for operand in (x, x != 0, x.nan_to_num(3.0).to(torch.int64)):
        assert torch.equal(run(either, reduce, "any", operand, [1]), operand.any(1))
    assert torch.allclose(run(either, reduce, "prod", x + 2, [1]), (x + 2).prod(1), rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("operand", ["rows", "columns", "middle", "transposed", "many results"])
def test_places_of_extrema(either, operand, name):
    make, dims = OPERANDS[operand]
    x = make()
    for dim in {dims[0], -1}:
        assert torch.equal(run(either, argreduce, name, x, dim), getattr(torch, name)(x, dim).int())
        kept = run(either, argreduce, name, x, dim, True)
        assert torch.equal(kept, getattr(torch, name)(x, dim, keepdim=True).int())


@pytest.mark.parametrize("count", [6, 200])
def test_extrema_that_are_not_finite_or_occur_twice(either, count):
    x = torch.ones(6, count)
    x[0, 3], x[1, 2], x[2, 4], x[3, 1:3], x[4, 2:5] = math.nan, math.inf, -math.inf, 5.0, -7.0
    x[5] = torch.tensor([-0.0, 0.0]).repeat(count // 2)
    for name in ("argmax", "argmin"):
        assert torch.equal(run(either, argreduce, name, x, 1), getattr(torch, name)(x, 1).int())
    for name in ("amax", "amin"):
        assert torch.equal(
            run(either, reduce, name, x, [1]).nan_to_num(9.0), getattr(torch, name)(x, 1).nan_to_num(9.0)
        )


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("count", [3, 150])
def test_running_sums(either, count, dim):
    shape = [2, 3, 4]
    shape[dim] = count
    x = drawn(*reversed(shape)).permute(2, 1, 0)
    assert torch.allclose(run(either, cumsum, x, dim).double(), x.double().cumsum(dim), rtol=1e-6, atol=1e-5)
    whole = (x * 10).to(torch.int64)
    assert torch.equal(run(either, cumsum, whole, dim), whole.cumsum(dim).int())


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("shape", "k"), [((3, 500), 5), ((2, 2, 9), 9), ((40,), 1), ((1, 3000), 64)])
def test_largest_elements(either, shape, k, largest):
    x = drawn(*shape)
    values, indices = run(either, topk, x, k, largest)
    expected = x.topk(k, largest=largest)
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices.int())


def test_largest_of_strided_integers_and_of_nan(either):
    x = torch.randperm(60, generator=torch.Generator().manual_seed(2)).view(20, 3) - 30
    values, indices = run(either, topk, x.t(), 4)
    assert torch.equal(values, x.t().topk(4).values.int())
    assert torch.equal(indices, x.t().topk(4).indices.int())
    odd = torch.tensor([1.0, math.nan, -math.inf, math.inf, 1.0])
    assert run(either, topk, odd, 5)[1].tolist() == [1, 3, 0, 4, 2]
    assert run(either, topk, odd, 5, False)[1].tolist() == [2, 0, 4, 3, 1]


def test_reductions_into_a_region(either):
    x = drawn(4, 100)
    runner = Runner(either)
    column = runner.output((4, 3), torch.float32).select(1, 1)
    reduce(runner.b, "sum", runner.operand(x), [1], False, column)
    assert torch.allclose(runner.read(column)[0], x.sum(1), atol=1e-5)


def test_what_has_no_step_is_refused(vulkan):  # noqa: F811
    for step, args, text in (
        (reduce, ("mean", torch.arange(3), [0]), "convert the operand"),
        (reduce, ("sum", torch.zeros(2, 0), [1]), "no elements"),
        (topk, (torch.zeros(3), 4), "must not be larger"),
    ):
        with pytest.raises(ValueError, match=text):
            run(vulkan, step, *args)
