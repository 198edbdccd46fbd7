"""Quantizing activations, interpreted and in torch ops, against the formulas of `qcore.weights.activations`."""

from __future__ import annotations

import pytest
import torch
from interpreting import assert_codes, assert_dynamic

from qcore.weights.activations import dynamic_parameters
from qcore_triton.codes import Given, given_of
from qcore_triton.kernels.order import position_of
from qcore_xpu import quantizing

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.fixture(params=["triton", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(quantizing, "why_not_triton", lambda: "Triton is not installed.")
    return request.param


def drawn(m, k, dtype=torch.float32):
    return (torch.randn(m, k, generator=torch.Generator().manual_seed(m + k)) + 0.3).to(dtype)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 77), (70, 128), (9, 1300)])
def test_codes_and_parameters_are_those_of_the_formula(way, symmetric, dtype, m, k):
    x = drawn(m, k, dtype)
    codes = quantizing.rows(x, symmetric, None, total=True)
    assert_dynamic(codes, x, symmetric)


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_longer_than_a_program_holds_are_read_twice(way, symmetric):
    x = drawn(2, 9001)
    codes = quantizing.rows(x, symmetric, None, total=True)
    assert_codes(codes.q, x, *dynamic_parameters(x, symmetric))
    assert torch.equal(codes.total, codes.q.sum(1, dtype=torch.int32))


@pytest.mark.parametrize("order", [32, 64, 128])
def test_columns_come_in_the_order_of_the_weight(order):
    x = drawn(5, 300)
    plain, ordered = (quantizing.rows(x, True, None, order=o) for o in (0, order))
    places = torch.tensor([position_of.fn(column, order) for column in range(384)])
    assert torch.equal(torch.empty_like(plain.q).index_copy_(1, places, plain.q), ordered.q)
    assert ordered.order == order


def test_strides_do_not_matter(way):
    x = drawn(6, 40)
    assert torch.equal(quantizing.rows(x.t(), True, None).q, quantizing.rows(x.t().contiguous(), True, None).q)
    part = x[::2, 1::3]
    assert_codes(quantizing.rows(part, True, None).q, part, *dynamic_parameters(part))


def test_a_row_of_zeros_has_scale_one(way):
    codes = quantizing.rows(torch.zeros(2, 5), False, None)
    assert codes.scale.tolist() == [1.0, 1.0]
    assert (codes.q[:, :5] == -128).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_no_number_makes_the_scale_none(way, bad, symmetric):
    x = drawn(3, 20)
    x[1, 3] = bad
    assert quantizing.rows(x, symmetric, None).scale.isnan().tolist() == [False, True, False]


def test_given_numbers_clamp_and_pass_on(way):
    x = drawn(3, 20) * 10
    x[0, 0], x[0, 1], x[2, 2] = float("inf"), -float("inf"), float("nan")
    codes = quantizing.rows(x, False, Given(0.05, -3))
    assert_codes(codes.q[:2], x[:2], 0.05, -3)
    assert codes.zero.tolist() == [-3.0] * 3
    assert torch.equal(codes.scale[:2], torch.full((2,), 0.05))
    assert codes.scale[2].isnan()


def test_given_parameters_per_token_and_codes_as_they_are(way):
    x, scale, zero = drawn(3, 20), torch.tensor([0.1, 0.02, 0.5]), torch.tensor([1, -30, 7], dtype=torch.int32)
    codes = quantizing.rows(x, False, Given(scale, zero))
    assert_codes(codes.q, x, scale[:, None], zero[:, None].float())
    assert codes.zero.tolist() == [1.0, -30.0, 7.0]
    whole = torch.randint(-128, 128, (3, 20), dtype=torch.int8)
    assert torch.equal(quantizing.rows(whole, False, Given(scale, zero)).q[:, :20], whole)
    assert torch.equal(quantizing.rows(whole, False, Given(0.1, 3)).q[:, :20], whole)


def test_a_scale_alone_has_no_zero_point(way):
    codes = quantizing.rows(drawn(2, 8), True, given_of(torch.full((2,), 0.1), None, None, 0))
    assert codes.zero.tolist() == [0.0, 0.0]


def test_no_rows(way):
    codes = quantizing.rows(torch.empty(0, 20), True, None, total=True)
    assert (codes.q.shape, codes.scale.shape, codes.total.shape) == ((0, 128), (0,), (0,))


def test_an_order_is_for_triton(monkeypatch):
    monkeypatch.setattr(quantizing, "why_not_triton", lambda: "Triton is not installed.")
    with pytest.raises(AssertionError, match="order"):
        quantizing.rows(drawn(1, 8), True, None, order=32)


@pytest.mark.parametrize(("m", "k"), [(1, 64), (1, 4096), (300, 256), (1 << 14, 8192), (3, 1 << 15)])
def test_programs_hold_as_many_values_as_a_work_group_takes(monkeypatch, m, k):
    launched = []
    monkeypatch.setattr(quantizing, "launch", lambda kernel, grid, *args, **meta: launched.append((grid, meta)))
    quantizing.rows(torch.empty(m, k, device="meta"), True, None)
    ((grid, meta),) = launched
    held = meta["BLOCK"] * meta.get("BM", 1)
    assert held <= 8192
    assert meta["num_warps"] == max(1, held // 512)
    assert grid[0] * meta.get("BM", 1) >= m
    assert meta["PDL"] is False
