"""Quantizing activations in Triton's interpreter, against the formulas of `qcore.weights.activations`."""

from __future__ import annotations

import pytest
import torch
from interpreting import assert_codes, assert_dynamic

from qcore.weights.activations import dynamic_parameters, quantize_int8

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # numpy, of infinities in tests
]


def rows(m, k, dtype=torch.float32):
    return (torch.randn(m, k, generator=torch.Generator().manual_seed(m + k)) + 0.3).to(dtype)


def quantize_given(x, scale, zero, dtype=torch.int8):
    """X quantized with given numbers, or tensors ``(M,)`` per token; an int8 x is taken as codes."""
    from qcore_triton.codes import Given

    return quantized(x, True, Given(scale, zero), dtype)


def quantized(x, symmetric, given, dtype):
    from qcore_cuda.products.quantized import codes_of
    from qcore_cuda.runtime.device import device_of
    from qcore_triton.codes import mode_of

    return codes_of(x, mode_of(x, symmetric, given), False, 0, device_of(x.device), dtype)


@pytest.mark.parametrize("given", ["none", "number", "token", "codes"])
@pytest.mark.parametrize("k", [1, 77, 600, 40001])
def test_float16_holds_codes_less_their_zero_points(given, k):
    from qcore_triton.codes import Given

    x = rows(3, k, torch.bfloat16 if k % 2 else torch.float32) * 2
    scale, zero = torch.tensor([0.01, 0.02, 0.04]), torch.tensor([127.0, -128.0, 3.0])
    if given == "codes":
        x = torch.randint(-128, 128, (3, k), generator=torch.Generator().manual_seed(k)).to(torch.int8)
    how = {"none": None, "number": Given(0.02, -128.0), "token": Given(scale, zero), "codes": Given(0.02, 127.0)}[given]
    codes, held = quantized(x, False, how, torch.int8), quantized(x, False, how, torch.float16)
    assert held.zero is None
    assert torch.equal(held.scale, codes.scale)
    assert torch.equal(held.q[:, :k].float(), codes.q[:, :k].float() - codes.zero[:, None])
    assert not held.q[:, k:].any()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k"), [(1, 1), (1, 77), (3, 128), (2, 600)])
def test_codes_and_parameters_are_those_of_the_formula(symmetric, dtype, m, k):
    from qcore_cuda.products.quantized import quantize_rows

    x = rows(m, k, dtype)
    codes = quantize_rows(x, symmetric=symmetric, total=True)
    assert_dynamic(codes, x, symmetric)


@pytest.mark.parametrize("exponent", [-115, -3, 0, 100])
def test_one_multiplication_rounds_bfloat16_as_the_quotient(exponent):
    from qcore_cuda.products.quantized import quantize_rows

    largest = torch.arange(128, 256) * 2.0 ** (exponent - 7)
    values = torch.cat([torch.arange(128, 256) * 2.0 ** (exponent - 7 - j) for j in range(10)])
    x = torch.minimum(values, largest[:, None])
    x = torch.cat([largest[:, None], x, largest[:, None] / 2], 1).bfloat16()
    scale, zero = dynamic_parameters(x, True)
    codes = quantize_rows(x, symmetric=True)
    assert torch.equal(codes.scale, scale.flatten())
    assert torch.equal(codes.q[:, : x.shape[1]], quantize_int8(x, scale, zero))


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_longer_than_the_registers_hold_are_read_twice(symmetric):
    from qcore_cuda.products.quantized import quantize_rows

    x = rows(2, 40001)
    codes = quantize_rows(x, symmetric=symmetric, total=True)
    scale, zero = dynamic_parameters(x, symmetric)
    assert_codes(codes.q, x, scale, zero)
    assert torch.equal(codes.total, codes.q.sum(1, dtype=torch.int32))


def test_strides_do_not_matter():
    from qcore_cuda.products.quantized import quantize_rows

    x = rows(6, 40)
    assert torch.equal(quantize_rows(x.t(), symmetric=True).q, quantize_rows(x.t().contiguous(), symmetric=True).q)
    part = x[::2, 1::3]
    assert_codes(quantize_rows(part, symmetric=True).q, part, *dynamic_parameters(part))


def test_a_row_of_zeros_has_scale_one():
    from qcore_cuda.products.quantized import quantize_rows

    codes = quantize_rows(torch.zeros(2, 5), symmetric=False)
    assert codes.scale.tolist() == [1.0, 1.0]
    assert (codes.q[:, :5] == -128).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_no_number_makes_the_scale_none(bad, symmetric):
    from qcore_cuda.products.quantized import quantize_rows

    x = rows(3, 20)
    x[1, 3] = bad
    scale = quantize_rows(x, symmetric=symmetric).scale
    assert scale.isnan().tolist() == [False, True, False]


def test_given_numbers_clamp_and_pass_on():
    x = rows(3, 20) * 10
    x[0, 0], x[0, 1] = float("inf"), -float("inf")
    codes = quantize_given(x, 0.05, -3)
    assert_codes(codes.q, x, 0.05, -3)
    assert codes.zero.tolist() == [-3.0] * 3
    assert torch.equal(codes.scale, torch.full((3,), 0.05))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, of what becomes infinite
@pytest.mark.parametrize("scale", [1e-42, 3e-39, 7e-31, 6e35, 7e35, 2e37, 3e38])
def test_given_numbers_may_have_any_size(scale):
    step = torch.tensor(scale)
    x = torch.arange(-150, 150).float()[None] * min(1.0, 3e38 / (scale * 150)) * step
    x[0, 0], x[0, 299], x[0, 1], x[0, 2] = float("inf"), -float("inf"), 3e38, -3e38
    for zero in (0, 5, -128):
        for given in (scale, step.view(1)):
            codes = quantize_given(x, given, zero if given is scale else torch.tensor([zero], dtype=torch.int32))
            expected = (torch.round(x.double() / step.double()) + zero).clamp(-128, 127)
            assert (codes.q[:, :300].double() - expected).abs().max() <= 1
            assert torch.equal(codes.q[0, [0, 299, 1, 2]].double(), expected[0, [0, 299, 1, 2]])


def test_given_parameters_per_token_and_codes_as_they_are():
    x, scale, zero = rows(3, 20), torch.tensor([0.1, 0.02, 0.5]), torch.tensor([1, -30, 7], dtype=torch.int32)
    codes = quantize_given(x, scale, zero)
    assert_codes(codes.q, x, scale[:, None], zero[:, None].float())
    whole = torch.randint(-128, 128, (3, 20), dtype=torch.int8)
    assert torch.equal(quantize_given(whole, scale, zero).q[:, :20], whole)


def test_memory_for_codes_has_whole_tiles(interpreter):
    from qcore_cuda.products.quantized import quantize_rows, rows_in_memory

    x = torch.randn(130, 100, generator=torch.Generator().manual_seed(0))
    for rows, held in ((1, 1), (8, 8), (9, 128), (128, 128), (130, 256)):
        codes = quantize_rows(x[:rows], symmetric=True).q
        assert codes.shape == (rows, 128)
        assert codes.is_contiguous()
        assert rows_in_memory(codes) == held
    codes = quantize_rows(x[:20], symmetric=True).q
    assert rows_in_memory(codes[4:]) == 16, "memory ends before a whole tile does"
    assert rows_in_memory(codes.clone()) == 20
