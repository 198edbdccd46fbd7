"""``cpu.linear`` beyond the kit: tails of tiles, digits of x, spikes, NaN and Inf, long sums, threads."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch

import qcore
from qcore.contracts import LINEAR, Problem
from qcore.contracts.inputs import Draw, Shape
from qcore.plugin_api import LinearRequest
from qcore_cpu import native

assert not native.fault()

from qcore_cpu import ops  # noqa: E402 - they exist once the library is loaded
from qcore_cpu.kinds import Kind, Mode  # noqa: E402
from qcore_cpu.linear import CpuLinear  # noqa: E402

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def kernel_for(scheme, dtype, n, k, out=None, *, bias=False):
    parsed = qcore.Scheme.parse(scheme)
    request = LinearRequest(
        torch.device("cpu"),
        dtype,
        out or dtype,
        n,
        k,
        None,
        parsed.weight,
        parsed.activation,
        parsed.output,
        bias,
        False,
    )
    return CpuLinear(request), request


def weight_for(request, *, lean=0.04):
    dense = torch.randn(request.n, request.k) * 0.05 + lean
    return qcore.quantize(dense, request.weight, "absmax" if request.weight.zero is qcore.ZeroPoint.NONE else "minmax")


def judge(kernel, request, x, weight, bias=None):
    verdict = LINEAR.judge(Problem(request, x, weight, bias), kernel(x, kernel.pack(weight), bias))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("rows", [*range(1, 14), 25, 100])
@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w8a16", "w8a8", "w4a8-g32", "mxfp4", "wnf4a16-g64"])
def test_each_tile(rows, scheme):
    for dtype in FLOATS:
        kernel, request = kernel_for(scheme, dtype, 37, 136)
        judge(kernel, request, (torch.randn(rows, 136) + 0.3).to(dtype), weight_for(request))


@pytest.mark.parametrize("scheme", ["wnf4a16", "w4a16-fzp", "w8a16-fzp"])
def test_rows_of_few_numbers_are_not_rounded_alike(scheme):
    """The errors of 16 or 256 numbers would add up over all columns."""
    draw = Draw(torch.Generator().manual_seed(3))
    filled = draw.fill(qcore.Scheme.parse(scheme))
    request = LINEAR.request_for(filled, torch.device("cpu"), torch.bfloat16, 200, 4104)
    problem = draw.linear(request, Shape("many", (130,), 200, 4104), filled.quantizer, torch.bfloat16)
    judge(CpuLinear(request), request, problem.x, problem.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", ["w4a16-g128-asym", "w4a16-g32", "w8a16", "wnf4a16-g64", "w4a8-g32"])
def test_panels_of_rows_and_columns(scheme, dtype):
    kernel, request = kernel_for(scheme, dtype, 330, 600)  # 11 blocks of columns, more than one part of K
    weight = weight_for(request)
    x = torch.randn(1030, 600).to(dtype)  # and three panels of rows
    judge(kernel, request, x, weight)
    packed, threads = kernel.pack(weight), torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(kernel(x, packed, None))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("n", [1, 31, 32, 33, 65])
@pytest.mark.parametrize("k", [1, 2, 7, 8, 9, 100, 129, 1000])
@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-g32", "w8a8-aasym", "w4a8-g32-asym-aasym"])
def test_tails(n, k, scheme):
    kernel, request = kernel_for(scheme, torch.float32, n, k, bias=True)
    judge(kernel, request, torch.randn(3, k) + 0.3, weight_for(request), torch.randn(n))


@pytest.mark.parametrize("group", [1, 3, 5, 12, 40, 100, 160, 192, 300])
@pytest.mark.parametrize("element", ["int4", "int8", "fp4"])
def test_any_group_size(group, element):
    for dtype in FLOATS:
        kernel, request = kernel_for(f"w{element.removeprefix('int')}a16-g{group}", dtype, 20, 777)
        judge(kernel, request, torch.randn(5, 777).to(dtype), weight_for(request))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scheme", ["w4a16-g128", "w8a16", "w4a16-g32-asym", "mxfp4"])
def test_outlier_leaves_other_columns_alone(dtype, scheme):
    # 300 sigma and more, where the weight is 0: nothing may come of it, at the depth of a large model.
    kernel, request = kernel_for(scheme, dtype, 16, 14336)
    weight = weight_for(request)
    x = torch.randn(4, 14336)
    columns = [5, 4000, 9001]
    codes = weight.codes().clone()
    zeros = weight.integer_zero()
    group = weight.format.group(14336)
    for column in columns:
        codes[:, column] = 0 if zeros is None else zeros[column // group]
        x[:, column] = 3e4
    still = qcore.QTensor.from_codes(codes, weight.scale, zeros, weight.format)
    judge(kernel, request, x.to(dtype), still)


@pytest.mark.parametrize(
    "scheme",
    ["w4a16-g32", "w4a16-g32-asym", "w4a16-g32-fzp", "w4a16", "w8a16", "w8a16-g32-asym", "w8a16-g64-fzp", "mxfp4"],
)
def test_outliers_times_their_weights(scheme):
    """At each place of a word of codes, in the first and the last columns."""
    for dtype, rows in itertools.product(FLOATS, (1, 2, 5)):
        kernel, request = kernel_for(scheme, dtype, 45, 264)
        x = torch.randn(rows, 264)
        for row in range(rows):
            x[row, [0, 33, 66, 99, 132, 165, 198, 231, 255, 263]] = 2000.0 * (row + 1)
        judge(kernel, request, x.to(dtype), weight_for(request))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "scheme", ["w4a16-g32", "w8a16", "w8a8", "w8a8-static(0.05,3)", "w4a8-g32-asym-aasym", "wnf4a16-g64"]
)
def test_what_is_not_finite_spoils_its_row_alone(value, scheme):
    for dtype in FLOATS:
        kernel, request = kernel_for(scheme, dtype, 40, 96)
        weight = weight_for(request)
        packed, x = kernel.pack(weight), torch.randn(14, 96).to(dtype)
        clean = kernel(x, packed, None)
        x[5, 17] = value
        spoiled = kernel(x, packed, None)
        others = [row for row in range(14) if row != 5]
        assert torch.equal(spoiled[others], clean[others])
        static_inf = "static" in scheme and not math.isnan(value)
        assert spoiled[5].isfinite().all() if static_inf else not spoiled[5].isfinite().all()
        if math.isnan(value):
            assert spoiled[5].isnan().all()


@pytest.mark.parametrize("scheme", ["w4a16-g32-fzp", "w8a16-g32-fzp", "w4a16-fzp", "w8a16-g32-asym"])
@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_an_infinite_x_times_the_weight_is_infinite(scheme, value):
    """Not what it is times the codes plus what it is times the zero points, which may differ in sign."""
    for dtype, rows in itertools.product(FLOATS, (1, 2, 3, 8, 12, 20)):
        kernel, request = kernel_for(scheme, dtype, 40, 96)
        weight, x = weight_for(request), torch.randn(rows, 96).to(dtype)
        dense = weight.dequantize(torch.float64)
        x[rows // 2, 17] = value
        expected = x.double() @ dense.t()
        found = kernel(x, kernel.pack(weight), None).double()
        assert torch.equal(found[rows // 2].nan_to_num(0.5), expected[rows // 2].nan_to_num(0.5)), (dtype, rows)
        others = [row for row in range(rows) if row != rows // 2]
        assert found[others].isfinite().all()


def test_rows_of_zeros_and_subnormal_numbers():
    for scheme in ("w4a16-g32", "w8a8", "w8a16"):
        kernel, request = kernel_for(scheme, torch.float32, 33, 64)
        weight = weight_for(request)
        assert not kernel(torch.zeros(3, 64), kernel.pack(weight), None).any()
        judge(kernel, request, torch.randn(3, 64) * 1e-39, weight)
        judge(kernel, request, torch.randn(3, 64) * 1e30, weight)


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-aasym", "w8a8-asym", "w4a8"])
def test_long_sums_stay_in_int32(scheme):
    k = 70_000
    kernel, request = kernel_for(scheme, torch.float32, 5, k)
    low, high = request.weight.code_range
    zero = torch.full((1, 5), low, dtype=torch.int8) if request.weight.zero is qcore.ZeroPoint.INT else None
    codes = torch.full((5, k), high, dtype=torch.int8)
    weight = qcore.QTensor.from_codes(codes, torch.full((1, 5), 0.01), zero, request.weight)
    x = torch.full((2, k), 127.0)
    x[1] = -127.0
    x[:, 0] = 126.0  # an asymmetric range that does not begin at 0 has a zero point
    judge(kernel, request, x, weight)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("scheme", ["w4a16", "w4a8", "wfp4a16", "w8a8", "w8a16", "w4a8-g32"])
def test_sums_in_words_of_16_bits_hold_the_largest(scheme, rows):
    for k, sign, dtype in itertools.product((8, 40, 104, 136), (1.0, -1.0), (torch.float32, torch.bfloat16)):
        kernel, request = kernel_for(scheme, dtype, 33, k)
        element = request.weight.element
        ends = (7, 15) if element.values else element.code_range  # of fp4: 6 and -6
        for code in ends:
            codes = torch.full((33, k), code, dtype=element.code_dtype)
            scale = torch.full((request.weight.groups(k), 33), 0.01)
            judge(
                kernel,
                request,
                torch.full((rows, k), sign, dtype=dtype),
                qcore.QTensor.from_codes(codes, scale, None, request.weight),
            )


def test_digits_hold_float32():
    # A product with the unit matrix gives x back, but for 24 bits of each block's largest value.
    kernel, request = kernel_for("w8a16", torch.float32, 128, 128)
    codes = torch.eye(128, dtype=torch.int8)
    weight = qcore.QTensor.from_codes(codes, torch.ones(1, 128), None, request.weight)
    x = torch.randn(50, 128)
    error = (kernel(x, kernel.pack(weight), None).double() - x.double()).abs()
    assert (error <= x.abs().amax(1, keepdim=True).double() * 2.0**-22).all()


def test_strided_rows_and_leading_dimensions():
    kernel, request = kernel_for("w4a16-g32", torch.bfloat16, 40, 64)
    packed = kernel.pack(weight_for(request))
    x = torch.randn(2, 3, 128).bfloat16()
    assert torch.equal(kernel(x[..., ::2], packed, None), kernel(x[..., ::2].contiguous(), packed, None))


def test_calls_from_several_threads_agree():
    kernel, request = kernel_for("w4a16-g128", torch.bfloat16, 256, 1024)
    packed, x = kernel.pack(weight_for(request)), torch.randn(64, 1024).bfloat16()
    expected, found = kernel(x, packed, None), []
    threads = [
        threading.Thread(target=lambda: found.extend(kernel(x, packed, None) for _ in range(20))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(torch.equal(expected, y) for y in found)


def test_number_of_threads_may_change_between_calls():
    kernel, request = kernel_for("w8a8", torch.bfloat16, 6400, 256)
    packed, x = kernel.pack(weight_for(request)), torch.randn(64, 256).bfloat16()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 2, 150):  # 150: more than `share_out` has parts
            torch.set_num_threads(threads)
            results.append(kernel(x, packed, None))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], y) for y in results)


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8"])
def test_a_default_device_changes_nothing(scheme):
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 32)), torch.randn(3, 64)
    qcore.quantize_(model, scheme)
    wanted = [model(x) for _ in range(2)][-1]
    with torch.device("meta"):  # where tensors are made that name no device
        assert torch.equal(model(x), wanted)
        assert model[0].weight.codes().device.type == "cpu"


@pytest.mark.parametrize("rows", [0, 1, 20])
@pytest.mark.parametrize("mode", [Mode.DIGITS, Mode.DYNAMIC, Mode.AFFINE, Mode.STATIC])
def test_the_op_takes_a_weight_without_rows(rows, mode):
    empty = torch.zeros(0, 8, 128, dtype=torch.uint8)
    given = [torch.randn(rows, 64), empty, torch.zeros(0), *[None] * 10, 0, 64, 64, int(Kind.INT4), mode]
    assert ops.linear(*given, False, 1.0, 0, 1.0, 0, ops.TYPES[torch.float32]).shape == (rows, 0)


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 8, 9, 12, 16, 40])
@pytest.mark.parametrize("scheme", ["wfp8a16", "wfp8_e5m2a16", "wfp8a16-g32", "wfp8_e5m2a16-g8"])
def test_each_code_of_fp8(rows, scheme):
    """Also those of NaN and Inf, which a weight refuses but memory may hold: a product by 1 is the number."""
    fmt = qcore.Scheme.parse(scheme).weight
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 64)
    for dtype in FLOATS:
        kernel, _ = kernel_for(scheme, dtype, 256, 64)
        packed = kernel.pack(qcore.quantize(torch.ones(256, 64), fmt, "absmax"))
        packed["data"] = ops.pack(codes, fmt.group(64), 8, 0)
        packed["scale"].fill_(0.5)
        x = torch.zeros(rows, 64, dtype=dtype)
        x[torch.arange(rows), torch.arange(rows) * 5 % 64] = 1
        numbers = fmt.element.lookup(torch.device("cpu"), torch.float32) * 0.5
        expected = numbers.to(dtype).expand(rows, 256)
        finite = numbers.isfinite()
        torch.testing.assert_close(kernel(x, packed, None)[:, finite], expected[:, finite], rtol=0, atol=0)
        assert not kernel(x, packed, None)[:, ~finite].isfinite().any()
