"""Products with float activations, in Triton's interpreter, against the contract's reference."""

from __future__ import annotations

from dataclasses import replace

import cuda_problems
import pytest
import torch
from cuda_problems import assert_right
from cuda_problems import linear_problem as problem

SCHEMES = (
    "w4a16", "w4a16-asym", "w4a16-g32-fzp", "w4a16-g64-asym", "w4a16-g128", "w4a16-g96-asym",
    "w8a16", "w8a16-asym", "w8a16-fzp", "w8a16-g32-asym", "w8a16-g64-fzp", "w8a16-g256",
)  # fmt: skip


def packed_weight(case):
    return cuda_problems.packed_weight(case)[0]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 20, 77), (3, 3, 300), (17, 33, 168), (2, 129, 5), (40, 16, 64)])
def test_the_default_is_right_for_every_scheme_and_size(scheme, m, n, k):
    from qcore_cuda.weight_only import linear

    dtype = (torch.bfloat16, torch.float16, torch.float32)[m % 3]
    case = problem(scheme, m, n, k, dtype, "same" if m > 2 else "none")
    assert_right(case, linear(case.x, packed_weight(case), case.bias, dtype))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["gemm", "scaled", "split", "even", "steps", "slices", "dense"])
def test_every_kernel_is_right_for_every_scheme(scheme, name):
    from qcore_cuda.device import device_of
    from qcore_cuda.dispatch import Config
    from qcore_cuda.weight_only import run

    configs = {
        "gemm": Config("gemm", 64, 32, stages=2),
        "scaled": Config("gemm", 64, 16, stages=2, scaled=True),
        "split": Config("gemm", 64, 16, stages=2, split=2),
        "even": Config("gemm", 64, 16, stages=2, even=1),
        "steps": Config("gemm", 64, 32, stages=2, unroll=2, scaled=True),
        "slices": Config("slices", 16, 16, stages=2),
        "dense": Config("dense"),
    }
    if name == "slices" and scheme.startswith("w4"):
        pytest.skip("slices is for int8 weights; int4 has gemv")
    case = problem(scheme, 17, 40, 300, torch.bfloat16, "same" if name == "dense" else "float32")
    result = run(case.x, packed_weight(case), case.bias, torch.bfloat16, device_of(case.x.device), configs[name])
    assert_right(case, result)


@pytest.mark.parametrize(("out", "x"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_results_of_another_dtype_are_rounded_once(out, x):
    from qcore_cuda.weight_only import linear

    case = problem("w4a16-g64-asym", 5, 20, 128, x)
    case = replace(case, request=replace(case.request, out_dtype=out))
    assert_right(case, linear(case.x, packed_weight(case), None, out))


@pytest.mark.parametrize("columns", ["columns", "rows"])
def test_x_may_have_any_strides(columns):
    from qcore_cuda.weight_only import linear

    case = problem("w4a16-g32-fzp", 6, 16, 64, strides=columns)
    assert_right(case, linear(case.x, packed_weight(case), None, torch.bfloat16))


@pytest.mark.parametrize("scheme", ["w4a16-g96-asym", "w8a16-g32-asym", "w4a16"])
def test_dense_weights_are_right(scheme):
    from qcore_cuda.weight_only import dense

    case = problem(scheme, 1, 37, 300)
    expected = case.weight.dequantize(torch.float64)
    # Triton's interpreter cuts float32 off where it makes bfloat16 of it; a GPU rounds.
    for dtype, rtol in ((torch.float32, 2**-22), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)):
        torch.testing.assert_close(dense(packed_weight(case), dtype).double(), expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(("n", "m", "even", "k"), [(64 * 3, 16, 1, 640), (64 * 9, 17, 1, 384), (64 * 5, 40, 2, 1152)])
def test_tiles_are_spread_evenly_over_programs(n, m, even, k):
    """4 programs of 3 tiles, 8 of 15, 4 of 18: parts of tiles, whole ones, and both."""
    from qcore_cuda.device import device_of
    from qcore_cuda.dispatch import Config
    from qcore_cuda.weight_only import run

    case = problem("w4a16-g128-asym", m, n, k, bias="same")
    config = Config("gemm", 64, 16, stages=2, even=even)
    result = run(case.x, packed_weight(case), case.bias, torch.bfloat16, device_of(case.x.device), config)
    assert_right(case, result)
    again = run(case.x, packed_weight(case), case.bias, torch.bfloat16, device_of(case.x.device), config)
    assert torch.equal(result, again)


def test_a_step_may_have_blocks_of_several_groups():
    from qcore_cuda.device import device_of
    from qcore_cuda.dispatch import Config
    from qcore_cuda.weight_only import run

    for scheme, k in (("w4a16-g128-asym", 512), ("w4a16-g128-fzp", 384), ("w4a16-g256", 1024), ("w8a16-g64-asym", 512)):
        case = problem(scheme, 17, 80, k)
        config = Config("gemm", 64, 32, stages=2, unroll=2, scaled=True, split=2)
        assert_right(case, run(case.x, packed_weight(case), None, torch.bfloat16, device_of(case.x.device), config))


def test_a_part_of_a_split_may_be_empty():
    from qcore_cuda.device import device_of
    from qcore_cuda.dispatch import Config
    from qcore_cuda.weight_only import run

    case = problem("w4a16-g128-asym", 17, 16, 640)  # 5 blocks for 4 programs: two each, so the last has none
    config = Config("gemm", 64, 32, stages=2, split=4)
    assert_right(case, run(case.x, packed_weight(case), None, torch.bfloat16, device_of(case.x.device), config))


@pytest.mark.parametrize("m", [1, 5, 6, 17])
@pytest.mark.parametrize("scheme", ["w4a16-g32-fzp", "w4a16-asym", "w8a16-g64-asym", "w8a16-fzp"])
def test_float32_is_served_by_few_and_many_rows(scheme, m):
    from qcore_cuda.weight_only import linear

    case = problem(scheme, m, 40, 300, torch.float32, "same" if m % 2 else "none")
    weight = packed_weight(case)
    for out in (torch.float32, torch.bfloat16):
        asked = replace(case, request=replace(case.request, out_dtype=out))
        assert_right(asked, linear(case.x, weight, case.bias, out))


@pytest.mark.parametrize(
    ("n", "k", "rows", "expected"),
    [
        (4096, 4096, 1024, (128, 64, 1)), (384, 384, 1024, (64, 32, 1)), (4096, 4096, 64, (64, 32, 2)),
        (4096, 4096, 16, (64, 16, 4)), (384, 1536, 16, (64, 16, 4)), (384, 384, 16, (64, 16, 1)),
    ],
)  # fmt: skip
def test_tiles_of_float32_are_as_large_as_there_are_enough_of(n, k, rows, expected):
    from qcore_cuda import thirds
    from qcore_cuda.device import Device
    from qcore_cuda.dispatch import Problem

    problem = Problem(4, n, k, rows, 128, narrow=False, exact=True)
    config = thirds.rule(Device(90, False, 132), problem)
    assert (config.bn, config.bm, config.split) == expected
    assert thirds.rule(Device(0, True, 304), problem).bm == 16


def test_what_was_measured_serves_float32():
    from qcore_cuda import dispatch, thirds
    from qcore_cuda.device import Device

    device, problem = Device(90, False, 132), dispatch.Problem(4, 64, 128, 32, 128, narrow=False, exact=True)
    for config in thirds.candidates(device, problem)[-2:]:
        assert dispatch.keep("float", device, problem, config)
        thirds.choose.cache_clear()
        assert thirds.choose(device, problem) == config


NUMBERS = (0.0, 3.4e38, -3.4e38, 1e-30, torch.pi, float("inf"), -float("inf"), float("nan"))


@pytest.mark.parametrize("arranged", [False, True])
@pytest.mark.parametrize("layout", ["rows", "columns", "every second"])
def test_three_parts_make_up_float32(layout, arranged):
    from qcore_cuda.device import device_of
    from qcore_cuda.thirds import split
    from qcore_triton.kernels.order import position_of

    m, k, columns = 3, 700, 768
    wide = torch.randn(2 * m, 2 * k)
    x = {"rows": wide[:m, :k], "columns": wide.view(-1, 2 * m).t()[:m, :k], "every second": wide[::2, ::2]}[layout]
    x[1, : len(NUMBERS)] = torch.tensor(NUMBERS)
    parts = split(x, columns, device_of(x.device), arranged=arranged).view(3, m, columns)
    if arranged:
        places = torch.tensor([position_of.fn(column, 128) for column in range(columns)])
        parts = torch.empty_like(parts).index_copy_(2, places, parts)
    low, middle, high = parts[..., :k]
    odd = ~x.isfinite()
    made = torch.where(odd, high, high.double() + middle.double() + low.double()).float()
    torch.testing.assert_close(made, x, rtol=0, atol=0, equal_nan=True)
    assert not low[odd].any()
    assert not middle[odd].any()
    assert not parts[..., k:].any()
