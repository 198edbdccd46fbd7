"""Int8 products in Triton's interpreter, against the contract's reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_problems import assert_right, packed_weight

from qcore import DynamicInt8, Scheme
from qcore.contracts import LINEAR
from qcore.contracts.inputs import Draw, Shape

pytestmark = pytest.mark.usefixtures("interpreter")

SCHEMES = (
    "w8a8",
    "w8a8-asym",
    "w8a8-fzp-aasym",
    "w8a8-asym-aasym",
    "w8a8-g32",
    "w8a8-g64-asym",
    "w8a8-g64-fzp-aasym",
    "w8a8-g128-aasym",
    "w8a8-static",
    "w8a8-static-o8",
    "w4a8",
    "w4a8-asym",
    "w4a8-fzp-aasym",
    "w4a8-g32",
    "w4a8-g32-asym-token-o8t",
    "w4a8-g64-asym-aasym",
    "w4a8-g96-asym-aasym",
    "w4a8-g128-fzp-aasym",
    "w4a8-g256-asym",
)
SIZES = ((1, 20, 77), (2, 1, 5), (15, 3, 64), (17, 33, 300), (33, 65, 96))


def config(name):
    from qcore_cuda.int8_config import Config

    return {
        "default": None,
        "slices": Config("slices", 16, 16, 2, 2),
        "tiles": Config("tiles", 32, 64, 4, 2),
        "tiles-swapped": Config("tiles", 16, 32, 4, 2, swap=True),
        "persistent": Config("persistent", 32, 32, 4, 2, parts=2, tma_store=True, per_sm=1, unpack=True),
        "persistent-pointers": Config("persistent", 32, 64, 4, 2, unpack=True),
    }[name]


def problem(scheme, m, n, k, dtype=torch.float32, bias="none", **kind):
    draw = Draw(torch.Generator().manual_seed(m + 7 * n + k))
    filled = draw.fill(Scheme.parse(scheme))
    request = LINEAR.request_for(filled, torch.device("cpu"), dtype, n, k)
    shape = Shape("case", (m,), n, k, bias=bias, **kind)
    return draw.linear(replace(request, bias=bias != "none"), shape, filled.quantizer, dtype)


def codes_for(problem, total=False):
    from qcore_cuda import int8
    from qcore_triton import packing

    weight = problem.weight.format
    order = packing.block_size(weight.group_size) if weight.bits == 4 else 0
    activation = problem.request.activation
    if isinstance(activation, DynamicInt8):
        return int8.quantize_rows(problem.x, symmetric=activation.symmetric, total=total, order=order)
    if activation.per_token:
        given = problem.given
        return int8.quantize_given(problem.x, given["x_scale"], given["x_zero_point"], total=total, order=order)
    return int8.quantize_given(problem.x, activation.scale, activation.zero_point, total=total, order=order)


def product(problem, config=None, total=False):
    from qcore_cuda import int8

    request, codes = problem.request, codes_for(problem, total)
    weight, sums = packed_weight(problem, sums=codes.zero is not None)
    output, numbers = request.output, (None, None)
    if output is not None:
        given = problem.given
        numbers = (output.scale, output.zero_point)
        numbers = (given["out_scale"], given["out_zero_point"]) if output.per_token else numbers
    return int8.linear(codes, weight, sums, problem.bias, request.out_dtype, *numbers, config=config)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_the_default_is_right_for_every_scheme_and_size(scheme, m, n, k):
    case = problem(scheme, m, n, k, torch.bfloat16 if m % 2 else torch.float32, "same" if m > 2 else "none")
    assert_right(case, product(case))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["slices", "tiles", "tiles-swapped", "persistent", "persistent-pointers"])
def test_every_kernel_is_right_for_every_scheme(scheme, name):
    case = problem(scheme, 17, 48, 300, torch.float16, "float32")
    assert_right(case, product(case, config(name), total=case.weight.zero is not None))


@pytest.mark.parametrize(
    "kind", [{"weights": "codes"}, {"weights": "narrow"}, {"inputs": "outliers"}, {"inputs": "zero-rows"}]
)
@pytest.mark.parametrize("scheme", ["w8a8-asym-aasym", "w4a8-g32-asym-aasym"])
def test_extreme_codes_narrow_scales_and_odd_inputs_are_right(scheme, kind):
    case = problem(scheme, 5, 20, 160, torch.float16, **kind)
    assert_right(case, product(case))


def test_more_columns_than_int32_sums_hold_are_added_in_parts():
    case = problem("w8a8-asym-aasym", 1, 3, (1 << 16) + 64, weights="codes")
    assert_right(case, product(case))


def test_sums_of_differences_from_zero_points_do_not_overflow():
    case = problem("w8a8-asym-aasym", 2, 2, 40000, weights="codes")
    case.x.fill_(1.0)
    assert_right(case, product(case))


@pytest.mark.parametrize("name", ["default", "tiles", "persistent"])
def test_a_row_without_a_number_gives_none_and_leaves_the_others(name):
    case = problem("w8a8", 3, 16, 64)
    case.x[1, 5] = float("nan")
    y = product(case, config(name))
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_no_rows_give_no_rows():
    assert product(problem("w4a8-g32", 0, 20, 64)).shape == (0, 20)


def test_many_rows_on_hopper_go_where_the_last_wave_wastes_least(monkeypatch):
    from qcore_cuda import hopper
    from qcore_cuda.device import Device
    from qcore_cuda.int8_config import Problem, choose

    monkeypatch.setattr(hopper, "usable", lambda: True)
    choose.cache_clear()
    device = Device(90, False, 132)
    found = {
        (n, rows): choose(device, Problem(8, n, 4096, rows, False, 128)).bn
        for n, rows in ((4096, 2048), (14336, 1024), (4096, 256))
    }
    assert found == {(4096, 2048): 256, (14336, 1024): 128, (4096, 256): 64}
    plain = Problem(8, 4096, 4096, 2048, False, 128)
    assert choose(device, plain).kernel == "specialized"
    others = (replace(plain, rows=64), replace(plain, bits=4), replace(plain, grouped=True), replace(plain, n=4100))
    assert all(choose(device, other).kernel != "specialized" for other in others)
    assert choose(device, plain, specialized=False).kernel != "specialized"
    assert choose(device._replace(arch=100), plain).kernel != "specialized"
    choose.cache_clear()
