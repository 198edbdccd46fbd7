"""Int8 products in Triton's interpreter, against the contract's reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_problems import assert_right, packed_weight
from grids import sampled

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
KERNELS = ("slices", "tiles", "tiles-swapped", "persistent", "persistent-pointers")
SIZES = ((1, 20, 77), (2, 1, 5), (15, 3, 64), (17, 33, 300), (33, 65, 96))


def choice(name):
    """A kernel with a configuration."""
    from qcore_cuda.products import int8_persistent, int8_slices, int8_tiles
    from qcore_cuda.products.base import Choice

    return {
        "slices": Choice(int8_slices.INT8_SLICES, int8_slices.Slice(16, 16, 2, 2)),
        "tiles": Choice(int8_tiles.INT8_TILES, int8_tiles.Tile(32, 64, 4, 2)),
        "tiles-swapped": Choice(int8_tiles.INT8_TILES, int8_tiles.Tile(16, 32, 4, 2, swap=True)),
        "persistent": Choice(
            int8_persistent.INT8_PERSISTENT, int8_persistent.Band(32, 32, 4, 2, pieces=2, tma_store=True, per_sm=1)
        ),
        "persistent-pointers": Choice(int8_persistent.INT8_PERSISTENT, int8_persistent.Band(32, 64, 4, 2)),
    }[name]


def problem(scheme, m, n, k, dtype=torch.float32, bias="none", **kind):
    draw = Draw(torch.Generator().manual_seed(m + 7 * n + k))
    filled = draw.fill(Scheme.parse(scheme))
    request = LINEAR.request_for(filled, torch.device("cpu"), dtype, n, k)
    shape = Shape("case", (m,), n, k, bias=bias, **kind)
    return draw.linear(replace(request, bias=bias != "none"), shape, filled.quantizer, dtype)


def codes_for(problem, total=False):
    from qcore_cuda.products.quantized import codes_of
    from qcore_cuda.runtime.device import device_of
    from qcore_triton import packing

    weight = problem.weight.format
    order = packing.block_size(weight.group_size) if weight.bits == 4 else 0
    return codes_of(problem.x, mode_for(problem), total, order, device_of(problem.x.device))


def mode_for(problem):
    """How x is quantized."""
    from qcore_triton.codes import Given, mode_of

    activation, given = problem.request.activation, None
    if not isinstance(activation, DynamicInt8):
        numbers = (activation.scale, activation.zero_point)
        given = problem.given
        given = Given(*((given["x_scale"], given["x_zero_point"]) if activation.per_token else numbers))
    return mode_of(problem.x, given is None and activation.symmetric, given)


def product(problem, chosen=None, total=False):
    """The result by the kernel that is chosen for the problem, or by another one."""
    from qcore_cuda import int8
    from qcore_cuda.products.base import Operands
    from qcore_triton.codes import Given

    request, codes = problem.request, codes_for(problem, total)
    weight, sums = packed_weight(problem, sums=codes.zero is not None)
    output, out = request.output, None
    if output is not None:
        given, numbers = problem.given, (output.scale, output.zero_point)
        out = Given(*((given["out_scale"], given["out_zero_point"]) if output.per_token else numbers))
    if chosen is None:
        return int8.linear(codes, weight, sums, problem.bias, request.out_dtype, out)
    plan = int8.plan_of(codes.q, weight, request.out_dtype, codes.zero is not None, out, own_order=True)
    kernel, config = chosen.product.adapted(plan.problem, chosen.config)
    return kernel.launch(codes, Operands(weight, sums, problem.bias, out), plan.device, plan.problem, config)


@pytest.mark.parametrize(("scheme", "m", "n", "k"), sampled([(s, *size) for s in SCHEMES for size in SIZES], 32))
def test_the_default_is_right_for_every_scheme_and_size(scheme, m, n, k):
    case = problem(scheme, m, n, k, torch.bfloat16 if m % 2 else torch.float32, "same" if m > 2 else "none")
    assert_right(case, product(case))


@pytest.mark.parametrize(("scheme", "name"), sampled([(s, name) for s in SCHEMES for name in KERNELS], 32))
def test_every_kernel_is_right_for_every_scheme(scheme, name):
    case = problem(scheme, 17, 48, 300, torch.float16, "float32")
    assert_right(case, product(case, choice(name), total=case.weight.zero is not None))


def in_float16(x, weight, bias, device, problem, config, tokens):
    """What `gemm_hopper` computes of a weight with units and of codes, in float64."""
    units = weight.units[: weight.n, None].double()
    dense = (expanded(weight).double() * units).half()
    assert torch.equal(dense.double(), expanded(weight).double() * units), "float16 holds the products"
    y = x[:, : weight.k].double() @ (dense.double() / units).t() * tokens[:, None].double()
    return (y if bias is None else y + bias.double()).to(problem.out_dtype)


def expanded(weight):
    from qcore_cuda.runtime.launch import launch
    from qcore_cuda.runtime.replay import empty
    from qcore_triton import host

    return host.dense(launch, empty, weight, torch.float32, num_warps=4)


UNITS = [(s, x) for s in ("w4a8-g32", "w4a8-g32-aasym", "w4a8-g64-aasym") for x in ("normal", "outliers", "zero-rows")]
UNITS += [("w4a8-g32-static", "normal"), ("w4a8-g32-static", "codes"), ("w4a8-g64-token", "normal")]


@pytest.mark.parametrize(("scheme", "inputs"), UNITS)
def test_codes_less_zero_points_meet_weights_with_units(monkeypatch, scheme, inputs):
    from qcore_cuda import int8
    from qcore_cuda.products.base import Operands
    from qcore_cuda.products.gemm_hopper import GEMM_HOPPER, Tokens
    from qcore_cuda.products.w4a8_units_hopper import W4A8_UNITS_HOPPER

    case = problem(scheme, 9, 40, 320, torch.bfloat16, "same", inputs=inputs, weights="narrow")
    mode = mode_for(case)
    weight, _ = packed_weight(case, units=True)
    plan = int8.plan_of(case.x, weight, torch.bfloat16, mode.has_zero, None)
    plan = plan._replace(product=W4A8_UNITS_HOPPER, config=Tokens(64), totals=False)
    monkeypatch.setattr(type(GEMM_HOPPER), "multiply", staticmethod(in_float16))
    assert_right(case, int8.run(case.x, mode, Operands(weight, None, case.bias, None), plan))


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
    y = product(case, None if name == "default" else choice(name))
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_no_rows_give_no_rows():
    assert product(problem("w4a8-g32", 0, 20, 64)).shape == (0, 20)


@pytest.mark.parametrize("bias", ["none", "same"])
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-asym-aasym", "w8a8-static-o8", "w4a8-g32-asym-token-o8t", "w4a8-g64"])
def test_many_rows_that_begin_anywhere_are_padded(scheme, bias):
    from qcore_cuda import int8
    from qcore_cuda.linear import kernel

    case = problem(scheme, 70, 50, 160, torch.bfloat16, bias)
    mine, launched = kernel(case.request), []
    packed = mine.pack(case.weight)

    def padded(y, n, device):
        launched.append((y.shape, n))
        return finished(y, n, device)

    finished = int8.finished
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8, "finished", padded)
        assert_right(case, mine.run(case.x, packed, case.bias, **case.given))
    assert launched == [((70, 64), 50)]
