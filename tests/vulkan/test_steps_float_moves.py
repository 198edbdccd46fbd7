"""Rows and elements at places that an index names, against torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from float_steps import Runner, run
from vulkan_problems import vulkan  # noqa: F401

from qcore_vulkan.steps.gather import gather, scatter_rows, take_along
from qcore_vulkan.steps.operand import Operand
from qcore_vulkan.steps.pointwise import checked, convert


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("columns", [8, 7, 1])
def test_rows_by_an_index(vulkan, dim, columns):  # noqa: F811
    x = drawn(5, 6, columns)
    index = torch.randint(0, x.shape[dim], (4,), generator=torch.Generator().manual_seed(dim))
    assert torch.equal(run(vulkan, gather, x, dim, index), x.index_select(dim, index))
    view = x.transpose(0, 1)
    index = index % view.shape[dim]
    assert torch.equal(run(vulkan, gather, view, dim, index), view.index_select(dim, index))


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 2)])
def test_a_table_by_an_index_of_any_shape(vulkan, shape):  # noqa: F811
    table, index = drawn(9, 12), torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(run(vulkan, gather, table, 0, index), table[index])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [8, 7])
def test_a_table_of_halves(vulkan, dtype, columns):  # noqa: F811
    table, index = drawn(9, columns).to(dtype), torch.tensor([[3, 8], [0, 3]])
    assert torch.equal(run(vulkan, gather, table, 0, index), table[index].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_larger_than_a_binding(vulkan, monkeypatch, dtype):  # noqa: F811
    table, index = drawn(700, 6).to(dtype), torch.tensor([699, 0, 127, 128, 129, 256, 500, 3])
    small = dataclasses.replace(vulkan.description.limits, max_storage_range=24 * 150)
    monkeypatch.setattr(vulkan, "description", dataclasses.replace(vulkan.description, limits=small))
    assert torch.equal(run(vulkan, gather, table, 0, index), table[index].float())


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_elements_by_an_index_each(vulkan, dim):  # noqa: F811
    x = drawn(4, 5, 6).transpose(1, 2)
    shape = [3, 4, 4]
    index = torch.randint(0, x.shape[dim], shape, generator=torch.Generator().manual_seed(dim))
    assert torch.equal(run(vulkan, take_along, x, dim, index), x.gather(dim, index))


@pytest.mark.parametrize("columns", [8, 6])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_are_written_in_place(vulkan, dim, columns):  # noqa: F811
    base = drawn(4, 6, columns)
    index = torch.randperm(base.shape[dim], generator=torch.Generator().manual_seed(dim))[:3]
    shape = [3 if d == dim else size for d, size in enumerate(base.shape)]
    source = drawn(*reversed(shape)).permute(2, 1, 0)
    runner = Runner(vulkan)
    target = convert(runner.b, runner.operand(base), torch.float32)
    scatter_rows(runner.b, target, dim, runner.operand(index), runner.operand(source))
    assert torch.equal(runner.read(target)[0], base.index_copy(dim, index, source))


def test_a_cache_is_updated_at_a_position(vulkan):  # noqa: F811
    """As a layer does: keys of one token (B, H, 1, E), a view of (B, 1, H E), into a cache (B, H, S, E)."""
    cache, keys, position = drawn(2, 3, 16, 8), drawn(2, 1, 24), torch.tensor([5])
    runner = Runner(vulkan)
    target = convert(runner.b, runner.operand(cache), torch.float32)
    view = keys.view(2, 1, 3, 8).transpose(1, 2)
    scatter_rows(runner.b, target, 2, runner.operand(position), runner.operand(view))
    assert torch.equal(runner.read(target)[0], cache.index_copy(2, position, view))


@pytest.mark.parametrize("wrap", [True, False])
def test_indices_are_checked(vulkan, wrap):  # noqa: F811
    index = torch.tensor([[0, 4, -1], [-5, 2, 1]])
    for values, right in ((index, wrap), (index.abs() % 5, True), (torch.tensor([5, 0]), False), (index.t(), wrap)):
        runner = Runner(vulkan)
        bad = runner.b.output(4)
        runner.b.fill(bad, 0)
        got = checked(runner.b, runner.operand(values), 5, bad, wrap)
        flag = Operand(bad, (1,), (1,), torch.int32)
        indices, said = runner.read(got, flag)
        assert said.item() == int(not right)
        expected = torch.where(values < 0, values + 5, values) if wrap else values
        assert torch.equal(indices, expected.clamp(0, 4).int())


def test_a_large_table_must_be_contiguous(vulkan, monkeypatch):  # noqa: F811
    small = dataclasses.replace(vulkan.description.limits, max_storage_range=1000)
    monkeypatch.setattr(vulkan, "description", dataclasses.replace(vulkan.description, limits=small))
    with pytest.raises(ValueError, match="must be contiguous"):
        run(vulkan, gather, drawn(20, 30).t(), 0, torch.tensor([1]))
