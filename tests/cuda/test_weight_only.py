"""Products with float activations, in Triton's interpreter, against the contract's reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import cuda_problems
import pytest
import torch
from cuda_problems import assert_right, float_product
from cuda_problems import linear_problem as problem
from grids import sampled

import qcore

SCHEMES = (
    "w4a16", "w4a16-asym", "w4a16-g32-fzp", "w4a16-g64-asym", "w4a16-g128", "w4a16-g96-asym",
    "w8a16", "w8a16-asym", "w8a16-fzp", "w8a16-g32-asym", "w8a16-g64-fzp", "w8a16-g256",
)  # fmt: skip
SIZES = ((1, 20, 77), (3, 3, 300), (17, 33, 168), (2, 129, 5), (40, 16, 64))
KERNELS = ("gemm", "scaled", "split", "even", "steps", "slices", "dense")
# slices is for int8 weights; int4 has gemv.
PAIRS = [(s, name) for s in SCHEMES for name in KERNELS if name != "slices" or s.startswith("w8")]
FLOAT32 = [(s, m) for s in ("w4a16-g32-fzp", "w4a16-asym", "w8a16-g64-asym", "w8a16-fzp") for m in (1, 5, 6, 17)]


def packed_weight(case):
    return cuda_problems.packed_weight(case)[0]


@pytest.mark.parametrize(("scheme", "m", "n", "k"), sampled([(s, *size) for s in SCHEMES for size in SIZES], 27))
def test_the_default_is_right_for_every_scheme_and_size(scheme, m, n, k):
    from qcore_cuda.weight_only import linear

    dtype = (torch.bfloat16, torch.float16, torch.float32)[m % 3]
    case = problem(scheme, m, n, k, dtype, "same" if m > 2 else "none")
    assert_right(case, linear(case.x, packed_weight(case), case.bias, dtype))


@pytest.mark.parametrize(("scheme", "name"), sampled(PAIRS, 27))
def test_every_kernel_is_right_for_every_scheme(scheme, name):
    from qcore_cuda.products.dense import DENSE, Whole
    from qcore_cuda.products.gemm import GEMM, Tile
    from qcore_cuda.products.slices import SLICES, Slice

    product, config = {
        "gemm": (GEMM, Tile(64, 32, stages=2)),
        "scaled": (GEMM, Tile(64, 16, stages=2, scaled=True)),
        "split": (GEMM, Tile(64, 16, stages=2, split=2)),
        "even": (GEMM, Tile(64, 16, stages=2, even=1)),
        "steps": (GEMM, Tile(64, 32, stages=2, unroll=2, scaled=True)),
        "slices": (SLICES, Slice(16, 16, stages=2)),
        "dense": (DENSE, Whole()),
    }[name]
    case = problem(scheme, 17, 40, 300, torch.bfloat16, "same" if name == "dense" else "float32")
    assert_right(case, float_product(case, packed_weight(case), product, config))


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
    from qcore_cuda.products.dense import dequantized

    case = problem(scheme, 1, 37, 300)
    expected = case.weight.dequantize(torch.float64)
    # Triton's interpreter cuts float32 off where it makes bfloat16 of it; a GPU rounds.
    for dtype, rtol in ((torch.float32, 2**-22), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)):
        torch.testing.assert_close(dequantized(packed_weight(case), dtype).double(), expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(("n", "m", "even", "k"), [(64 * 3, 16, 1, 640), (64 * 9, 17, 1, 384), (64 * 5, 40, 2, 1152)])
def test_tiles_are_spread_evenly_over_programs(n, m, even, k):
    """4 programs of 3 tiles, 8 of 15, 4 of 18: parts of tiles, whole ones, and both."""
    from qcore_cuda.products.gemm import GEMM, Tile

    case = problem("w4a16-g128-asym", m, n, k, bias="same")
    config, weight = Tile(64, 16, stages=2, even=even), packed_weight(case)
    result = float_product(case, weight, GEMM, config)
    assert_right(case, result)
    assert torch.equal(result, float_product(case, weight, GEMM, config))


def test_a_step_may_have_blocks_of_several_groups():
    from qcore_cuda.products.gemm import GEMM, Tile

    for scheme, k in (("w4a16-g128-asym", 512), ("w4a16-g128-fzp", 384), ("w4a16-g256", 1024), ("w8a16-g64-asym", 512)):
        case = problem(scheme, 17, 80, k)
        config = Tile(64, 32, stages=2, unroll=2, scaled=True, split=2)
        assert_right(case, float_product(case, packed_weight(case), GEMM, config))


def test_a_part_of_a_split_may_be_empty():
    from qcore_cuda.products.gemm import GEMM, Tile

    case = problem("w4a16-g128-asym", 17, 16, 640)  # 5 blocks for 4 programs: two each, so the last has none
    assert_right(case, float_product(case, packed_weight(case), GEMM, Tile(64, 32, stages=2, split=4)))


@pytest.mark.parametrize(("scheme", "m"), sampled(FLOAT32, 6))
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
    from qcore_cuda.products.float32_split import FLOAT32_SPLIT
    from qcore_cuda.runtime.device import Device

    problem = float32_problem(n, k, rows)
    config = FLOAT32_SPLIT.rule(Device(90, False, 132), problem)
    assert (config.bn, config.bm, config.split) == expected
    assert FLOAT32_SPLIT.rule(Device(0, True, 304), problem).bm == 16


def float32_problem(n, k, rows):
    from qcore_cuda.problem import GemmProblem, bucket

    return GemmProblem(4, n, k, rows, x_dtype=torch.float32, out_dtype=torch.float32, split_rows=bucket(3 * rows))


@pytest.mark.parametrize("kernel", ["float32_split", "gemv"])
def test_a_measurement_decides_for_its_problem(kernel):
    from qcore_cuda import selection
    from qcore_cuda.runtime.device import Device

    device, problem = Device(90, False, 132), float32_problem(64, 128, 4 if kernel == "gemv" else 32)
    for choice in selection.candidates(device, problem)[-2:]:
        assert choice.product.name == kernel
        assert selection.keep(device, problem, choice)
        selection.choose.cache_clear()
        assert selection.choose(device, problem) == choice
    selection.choose.cache_clear()


@pytest.mark.parametrize("fields", [{"bn": 64}, {"bn": 64, "bm": 16, "of": "another version"}, {}])
def test_a_damaged_record_is_passed_over(fields):
    from qcore_cuda import measured, selection
    from qcore_cuda.runtime.device import Device

    device, problem = Device(90, False, 132), float32_problem(64, 256, 32)
    expected = selection.choose(device, problem)
    assert measured.keep(device, problem, measured.Record("float32_split", fields))
    selection.choose.cache_clear()
    assert selection.choose(device, problem) == expected


NUMBERS = (0.0, 3.4e38, -3.4e38, 1e-30, torch.pi, float("inf"), -float("inf"), float("nan"))


@pytest.mark.parametrize("arranged", [False, True])
@pytest.mark.parametrize("layout", ["rows", "columns", "every second"])
def test_three_parts_make_up_float32(layout, arranged):
    from qcore_cuda.products.float32_split import split
    from qcore_cuda.runtime.device import device_of
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


HALF = ("w4a16-g128", "w4a16-g32-asym", "w8a16-g64", "w8a16-g128-asym")


@pytest.mark.parametrize("scheme", HALF)
@pytest.mark.parametrize(("size", "dtype"), [(1e-3, torch.float16), (1e-7, torch.bfloat16), (3e4, torch.float32)])
def test_scales_brought_into_float16_come_back_by_the_bit(scheme, size, dtype):
    from qcore_triton import packing

    dense = torch.randn(24, 256) * size
    dense[3] *= 2.0**-6
    weight = qcore.quantize(dense, scheme.replace("w", "int").replace("a16", ""), scale_dtype=dtype)
    assert packing.has_half(weight.format)
    packed = packing.pack(weight, half=True)
    assert packed["factor"].shape == (1,)
    assert 2**6 <= packed["scale"].abs().max() < 2**7
    again = packing.unpack(packed, weight.format, 24, 256)
    assert torch.equal(again.scale, weight.scale)
    assert torch.equal(again.data, weight.data)


@pytest.mark.parametrize("far", [2.0**-24, float("inf"), float("nan")])
def test_scales_that_float16_cannot_hold_stay_as_they_are(far):
    from qcore_triton import packing

    weight = qcore.quantize(torch.randn(16, 256), "int4-g128")
    weight.scale[1, 3] = weight.scale.max() * far
    packed = packing.pack(weight, half=True)
    assert packed["factor"].shape == (0,)
    assert torch.equal(packed["scale"].nan_to_num(), weight.scale.nan_to_num())
    assert packing.weight_of(packed, weight.format, 16, 256).factor is None


@pytest.mark.parametrize("m", [1, 3, 17, 40])
@pytest.mark.parametrize("scheme", HALF)
def test_factors_of_integers_are_multiplied_by(interpreter, scheme, m):
    from qcore_cuda.linear import kernel

    case = problem(scheme, m, 48, 256, torch.float16, "same")
    case = replace(case, weight=replace_scale(case.weight))
    mine = kernel(case.request)
    packed = mine.pack(case.weight)
    assert packed["factor"].shape == (1,)
    assert_right(case, mine.run(case.x, packed, case.bias))


def replace_scale(weight):
    """The weight with scales of a few powers of two."""
    scale = torch.ldexp(torch.ones_like(weight.scale), torch.randint(-9, -3, weight.scale.shape))
    return replace(weight, scale=scale)


def test_float16_takes_hoppers_kernel_if_its_scales_allow_it(monkeypatch):
    from qcore_cuda.problem import Form, float_problem
    from qcore_cuda.products.gemm_hopper import GEMM_HOPPER
    from qcore_cuda.runtime import hopper
    from qcore_cuda.runtime.device import Device

    monkeypatch.setattr(hopper, "usable", lambda: True)
    device, half = Device(90, False, 132), torch.float16
    for factor in (False, True):
        form = Form((4096, 4096), 32, None, 4096, 4096, 8, 128, factor=factor)
        assert GEMM_HOPPER.serves(device, float_problem(form, 512, half, half)) == factor
        assert not GEMM_HOPPER.serves(device, float_problem(form, 512, half, torch.float32))


@pytest.mark.parametrize("scheme", ["w4a16-fzp", "w8a16-fzp", "wfp8a16-fzp", "wfp4a16-fzp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float_zero_points_of_rows_meet_sums_of_x(interpreter, scheme, dtype):
    from qcore_cuda.products.gemm import GEMM, Tile

    case = problem(scheme, 20, 50, 300, dtype, "same")
    for tile in (Tile(64, 16, scaled=True), Tile(64, 32, split=2), Tile(64, 16, unroll=2, even=1, scaled=True)):
        assert_right(case, float_product(case, packed_weight(case), GEMM, tile))


def test_no_kernel_rounds_weights_with_float_zero_points_of_rows(monkeypatch):
    from qcore_cuda.problem import Form, float_problem
    from qcore_cuda.products.catalog import FLOAT_PRODUCTS
    from qcore_cuda.runtime import hopper
    from qcore_cuda.runtime.device import Device

    monkeypatch.setattr(hopper, "usable", lambda: True)
    narrow, device = (torch.bfloat16, torch.float16), Device(90, False, 132)
    for x, out, packed in product(narrow, narrow, ((256, 32, 16, 64), (4096, 4096))):
        form = Form(packed, 1, torch.float32, 4096, 4096, 4 if len(packed) > 2 else 8, 4096)
        found = float_problem(form, 2048, x, out)
        assert (found.exact, found.whole, found.sums) == (True, True, True)
        names = {kernel.name for kernel in FLOAT_PRODUCTS if kernel.serves(device, found)}
        assert "gemm_hopper" in names
        assert "dense" not in names
    assert not float_problem(form, 2048, torch.bfloat16, torch.float32).sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("scheme", "n", "k"), [("w4a16-g32-asym", 50, 161), ("w8a16-fzp", 33, 77), ("nf4", 24, 100)])
def test_dequantized_rows_begin_on_16_bytes(interpreter, monkeypatch, scheme, n, k, dtype):
    from qcore_cuda.products import dense

    case, seen = problem(scheme, 20, n, k, dtype, "same"), []

    def product_of(x, w, bias, out_dtype):
        seen.extend([x.shape[1] % 8, *(side % 8 for side in w.shape), x.is_contiguous()])
        return multiplied(x, w, bias, out_dtype)

    multiplied = dense.product_of
    monkeypatch.setattr(dense, "product_of", product_of)
    y = float_product(case, cuda_problems.packed_weight(case)[0], dense.DENSE, dense.Whole())
    assert seen == [0, 0, 0, True]
    assert y.shape == (20, n)
    assert_right(case, y)
