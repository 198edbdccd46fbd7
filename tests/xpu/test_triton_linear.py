"""Linear layers that Triton serves, interpreted, against the contract's reference."""

from __future__ import annotations

import threading

import pytest
import torch
from xpu_triton_problems import check, kernel_for, linear_problem, why_not

from qcore import Format, FormatError, QTensor

pytestmark = pytest.mark.usefixtures("interpreter")

SCHEMES = (
    "w8a8-g32",
    "w8a8-g64-asym",
    "w8a8-g64-fzp-aasym",
    "w8a8-g128-aasym",
    "w8a8-g96-asym-static",
    "w4a8",
    "w4a8-asym",
    "w4a8-fzp-aasym",
    "w4a8-aasym",
    "w4a8-static-o8",
    "w4a8-g32",
    "w4a8-g32-o8",
    "w4a8-g32-asym-token",
    "w4a8-g32-asym-token-o8t",
    "w4a8-g64-asym-aasym",
    "w4a8-g96-asym-aasym",
    "w4a8-g128-fzp-aasym",
    "w4a8-g256-asym",
)
SIZES = ((1, 20, 77), (2, 1, 5), (15, 3, 64), (17, 33, 300), (70, 129, 96))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_every_scheme_is_right_for_every_size(scheme, m, n, k):
    dtype = (torch.float32, torch.bfloat16, torch.float16)[m % 3]
    check(linear_problem(scheme, m, n, k, dtype, ("none", "same", "float32")[n % 3]))


@pytest.mark.parametrize(
    "kind",
    [
        {"weights": "codes"}, {"weights": "narrow"}, {"weights": "zeros"}, {"weights": "tiny"}, {"inputs": "outliers"},
        {"inputs": "zero-rows"}, {"inputs": "large"}, {"strides": "columns"}, {"strides": "rows"},
    ],
    ids=lambda kind: "-".join(kind.values()),
)  # fmt: skip
@pytest.mark.parametrize("scheme", ["w8a8-g32-asym-aasym", "w4a8-g32-asym-aasym", "w4a8-fzp-static"])
def test_extreme_codes_narrow_scales_and_odd_inputs_are_right(scheme, kind):
    check(linear_problem(scheme, 5, 20, 160, torch.float16, **kind))


@pytest.mark.parametrize("scheme", ["w8a8-asym-aasym", "w8a8-fzp", "w8a8-static"])
def test_whole_channels_of_int8_are_right_too(scheme):
    """ATen's ops serve them first; where torch lacks one, this does."""
    check(linear_problem(scheme, 5, 20, 77, bias="same"))


def test_more_columns_than_int32_sums_hold_are_added_in_parts():
    check(linear_problem("w8a8-asym-aasym", 1, 3, (1 << 16) + 64, weights="codes"))


def test_sums_of_differences_from_zero_points_do_not_overflow():
    case = linear_problem("w8a8-asym-aasym", 2, 2, 40000, weights="codes")
    case.x.fill_(1.0)
    check(case)


def test_a_row_without_a_number_gives_none_and_leaves_the_others():
    case = linear_problem("w4a8-g32", 3, 16, 64)
    case.x[1, 5] = float("nan")
    kernel = kernel_for(case.request)
    y = kernel(case.x, kernel.pack(case.weight), None)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("scheme", ["w4a8-g32", "w8a16-asym"])
def test_no_rows_give_no_rows(scheme):
    assert check(linear_problem(scheme, 0, 20, 64)).shape == (0, 20)


@pytest.mark.parametrize("scheme", ["w4a8-g96-asym", "w8a8-g32-fzp-aasym", "w4a16-g32-asym", "w8a16"])
def test_packing_keeps_every_bit(scheme):
    case = linear_problem(scheme, 1, 37, 100, weights="codes")
    kernel = kernel_for(case.request)
    back = kernel.unpack(kernel.pack(case.weight))
    assert isinstance(back, QTensor)
    for mine, true in zip(back.tensors().values(), case.weight.tensors().values(), strict=True):
        assert torch.equal(mine, true)


def test_another_weight_is_not_packed():
    case, other = linear_problem("w4a8-g32", 1, 16, 64), linear_problem("w4a8-g64", 1, 16, 64)
    with pytest.raises(FormatError, match="was made for"):
        kernel_for(case.request).pack(other.weight)


def test_calls_from_several_threads_do_not_meet():
    case = linear_problem("w4a8-g32-asym-aasym", 3, 16, 64)
    kernel = kernel_for(case.request)
    packed = kernel.pack(case.weight)
    expected, found = kernel(case.x, packed, None), []
    threads = [threading.Thread(target=lambda: found.append(kernel(case.x, packed, None))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(one, expected) for one in found)


@pytest.mark.parametrize("scheme", ["w4a8-g32-asym-token-o8t", "w8a8-g64-asym-aasym", "w8a16-asym"])
def test_ops_agree_with_their_fakes(scheme):
    from qcore_xpu_stand_in.replacing import register_for_cpu
    from torch.library import opcheck

    from qcore_xpu import triton_linear, triton_ops

    register_for_cpu()
    case = linear_problem(scheme, 3, 16, 64, bias="same")
    kernel = kernel_for(case.request)
    packed, given = kernel.pack(case.weight), case.given
    weight = (packed["data"], packed["scale"], packed.get("zero"))
    if isinstance(kernel, triton_linear.DenseLinear):
        opcheck(triton_ops.op_linear_dense, (case.x, *weight, case.bias, *kernel.sizes, case.request.out_dtype))
        return
    names = ("x_scale", "x_zero_point", "out_scale", "out_zero_point")
    tensors = (case.x, *weight, packed.get("sums"), case.bias, *map(given.get, names))
    opcheck(triton_ops.op_linear_a8, (*tensors, *kernel._constants))


def test_what_has_no_kernel_is_refused_with_a_reason(monkeypatch):
    from qcore_xpu import triton_linear

    assert "not a multiple of 32" in why_not(linear_problem("w4a8-g40", 1, 16, 80).request)
    monkeypatch.setattr(triton_linear, "why_not_triton", lambda: "Triton is not installed.")
    assert why_not(linear_problem("w4a8-g32", 1, 16, 64).request) == "Triton is not installed."


@pytest.mark.parametrize("scheme", ["w4a8", "w8a8-g32", "w8a16-asym"])
def test_without_dpas_only_int8_products_are_refused(monkeypatch, scheme):
    from qcore_xpu import triton_linear

    monkeypatch.setattr(triton_linear, "why_not_int8", lambda device: f"no DPAS on {device}")
    reason = why_not(linear_problem(scheme, 1, 16, 64).request)
    assert reason == ("" if scheme == "w8a16-asym" else "no DPAS on cpu")


def test_names_say_what_runs():
    names = {scheme: kernel_for(linear_problem(scheme, 1, 16, 64).request).name for scheme in ("w4a8", "w8a8-g32")}
    assert names == {"w4a8": "xpu.w4a8", "w8a8-g32": "xpu.w8a8"}
    assert kernel_for(linear_problem("w8a16-asym", 1, 16, 64).request).name == "xpu.dense_w8a16"


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 4096), (16, 20), (17, 100), (64, 129), (65, 33), (4096, 14336)])
def test_tiles_are_what_dpas_takes(m, n):
    from qcore_xpu.tiles import tile_for

    tile = tile_for(m, n)
    assert tile.bm % 8 == 0
    assert tile.bn % 16 == 0
    blocks = tile.bm // 8 * (tile.bn // 16)
    assert blocks % tile.warps == 0
    assert 1 <= blocks // tile.warps <= 2
    assert tile.bn < 2 * max(n, 16)


def test_a_packed_weight_is_one_that_qcore_cuda_reads_too():
    kernel = kernel_for(linear_problem("w4a8-g64", 1, 50, 192).request)
    assert kernel.packing == "triton.planar16"
    assert kernel.format == Format("int4", 64)
