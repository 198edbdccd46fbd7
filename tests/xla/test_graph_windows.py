"""Rules over windows, of running products, of sorted tables and of special functions, against torch."""

import operator
from functools import partial

import pytest
import torch
from graph_backends import part_of, part_of_call
from graph_cases import IMAGE, I, X
from graph_window_cases import CASES
from torch import nn
from torch.nn import functional as F

from qcore_xla.graphs import lowering
from qcore_xla.graphs.backend import qcore_xla
from qcore_xla.graphs.program import Program


@pytest.mark.parametrize("name", CASES)
def test_rules(name):
    for function, args in CASES[name]:
        part, tensors, _, expected = part_of_call(function, args)
        part.graph.graph.eliminate_dead_code()  # indices of maxima that nothing reads
        called = [node for node in part.nodes if node.target is not operator.getitem]
        assert name in {lowering.rule_name(node.target) for node in called}
        assert not [why for node in called if (why := lowering.why_not(node))]
        (y,) = Program(part)(tensors)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected, rtol=5e-5, atol=5e-5, equal_nan=True)


@pytest.mark.parametrize(("function", "args", "reason"), [
    (lambda x: torch.cat([y.flatten() for y in F.max_pool2d(x, 2, return_indices=True)]), (IMAGE,), "indices are read"),
    (lambda x: F.adaptive_max_pool2d(x, 4), (IMAGE,), "overlap"),
    (lambda x: x[:, 1:].as_strided((3, 2), (2, 1)), (X,), "view"),
    (lambda x: x.cumprod(0), (I,), "32 bits"),
    (lambda x, i: x.scatter_reduce(0, i % 2, x, "sum"), (I, I), "integers"),
    (lambda x, i: torch.searchsorted(x, x, sorter=i % 4), (X, I), "sorter"),
])  # fmt: skip
def test_what_is_not_lowered_has_a_reason(function, args, reason):
    found = [lowering.why_not(node) for node in part_of(function, *args).nodes]
    assert any(reason in why for why in found), found


@torch.no_grad()
def test_a_part_without_tensors_from_outside():
    def nearest(x):
        return torch.special.i0(torch.arange(5.0) / 4) + x

    torch._dynamo.reset()
    x = torch.ones(5)
    torch.testing.assert_close(torch.compile(nearest, backend="qcore_xla")(x), nearest(x))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduce", ["sum", "mean", "add"])
def test_many_16_bit_numbers_are_scattered_to_one(reduce, dtype):
    index, x, ones = torch.zeros(3000, dtype=torch.int64), torch.zeros(1, dtype=dtype), torch.ones(3000, dtype=dtype)

    def scattered(x, source):
        if reduce == "add":
            return x.scatter_add(0, index, source)
        return x.scatter_reduce(0, index, source, reduce, include_self=False)

    wanted = 1.0 if reduce == "mean" else 3000.0
    torch.testing.assert_close(torch.compile(scattered, backend=qcore_xla)(x, ones).item(), wanted, rtol=4e-3, atol=0)


@torch.no_grad()
def test_infinity_stays_in_its_window():
    x = torch.randn(1, 2, 4, 5)
    x[0, 0, 0, 0], x[0, 1, 3, 4] = torch.inf, torch.nan
    pool = nn.AdaptiveAvgPool2d((2, 3))
    torch.testing.assert_close(torch.compile(pool, backend=qcore_xla)(x), pool(x), equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize("right", [False, True])
def test_nan_is_behind_all_of_a_table(right):
    table, x = torch.tensor([[0.0, 1, 3], [1, 2, 4]]), torch.tensor([[torch.nan, 1.0], [torch.nan, 2]])
    compiled = torch.compile(partial(torch.searchsorted, right=right), backend=qcore_xla)
    assert torch.equal(compiled(table, x), torch.searchsorted(table, x, right=right))
