"""The packed layouts: unpack(pack(w)) is w, bytes are where the documentation says, sums are sums."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qcore
from qcore import QTensor
from qcore.resolving.verification import difference, same_bits
from qcore.testing.laws.plugin import formats
from qcore_triton import packing
from qcore_triton.packing import (
    PackedKernel,
    block_size,
    group_sums,
    pack,
    packing_name,
    units_of,
    unpack,
    why_not_group,
)

INTEGERS = [fmt for fmt in formats("cuda") if fmt.dtype in ("int4", "int8")]
SERVED = [fmt for fmt in INTEGERS if block_size(fmt.group_size)]
SHAPES = ((1, 1), (3, 5), (20, 77), (16, 168), (32, 256), (129, 130))


def weight_of(fmt, n, k, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    low, high = fmt.code_range
    codes = torch.randint(low, high + 1, (n, k), generator=generator).to(torch.int8)
    groups = (fmt.groups(k), n)
    scale = (torch.rand(groups, generator=generator) + 0.01).to(dtype)
    zero = None
    if fmt.zero is qcore.ZeroPoint.INT:
        zero = torch.randint(low, high + 1, groups, generator=generator).to(torch.int8)
    if fmt.zero is qcore.ZeroPoint.FLOAT:
        zero = torch.randn(groups, generator=generator).to(dtype)
    return qcore.QTensor.from_codes(codes, scale, zero, fmt)


@pytest.mark.parametrize("fmt", SERVED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unpack_is_the_inverse(fmt, dtype):
    for n, k in SHAPES:
        weight = weight_of(fmt, n, k, dtype)
        assert difference(unpack(pack(weight, sums=True), fmt, n, k), weight) == ""


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 40),
    k=st.integers(1, 300),
    group=st.sampled_from([None, 32, 64, 96, 128, 160, 192, 256, 1024]),
    zero=st.sampled_from(list(qcore.ZeroPoint)),
    layout=st.sampled_from(["int4/plain", "int4/plain_int32", "int8/plain"]),
)
def test_unpack_is_the_inverse_whatever_the_sizes(n, k, group, zero, layout):
    parsed = qcore.Format.parse(layout)
    fmt = qcore.Format(parsed.dtype, group, zero, parsed.layout)
    weight = weight_of(fmt, n, k, seed=n * k)
    assert difference(unpack(pack(weight), fmt, n, k), weight) == ""


@pytest.mark.parametrize("fmt", SERVED, ids=str)
def test_chunks_of_rows_make_no_difference(fmt, monkeypatch):
    weight = weight_of(fmt, 50, 70)
    whole = pack(weight, sums=True)
    monkeypatch.setattr(packing, "_CHUNK", 70 * 16)
    parts = pack(weight, sums=True)
    assert all(same_bits(whole[name], parts[name]) for name in whole)
    assert difference(unpack(parts, fmt, 50, 70), weight) == ""


@pytest.mark.parametrize("fmt", SERVED, ids=str)
def test_meta_has_the_same_form(fmt):
    weight = weight_of(fmt, 20, 77)
    real, meta = pack(weight, sums=True), pack(weight.to("meta"), sums=True)
    assert real.keys() == meta.keys()
    for name in real:
        assert (real[name].shape, real[name].dtype) == (meta[name].shape, meta[name].dtype), name
        assert real[name].is_contiguous()
    back = unpack(meta, fmt, 20, 77)
    assert (back.data.shape, back.data.dtype) == (weight.data.shape, weight.data.dtype)


@pytest.mark.parametrize(
    ("group", "block"), [(None, 128), (128, 128), (256, 128), (64, 64), (192, 64), (32, 32), (96, 32)]
)
def test_planar16_is_where_it_is_said_to_be(group, block):
    fmt = qcore.Format("int4", group)
    n, k = 37, 300
    assert block_size(group) == block
    weight = weight_of(fmt, n, k)
    data, codes = pack(weight)["data"], weight.codes()
    assert data.dtype == torch.uint8
    assert data.shape == (math.ceil(n / 16), math.ceil(k / block), 16, block // 2)
    for row, column in ((0, 0), (36, 299), (17, 31), (16, 150), (5, 128)):
        b, i = divmod(column, block)
        j, h, t, e = i % (block // 2) // 16, i // 8 % 2, i // 2 % 4, i % 2
        byte = int(data[row // 16, b, row % 16, block // 8 * t + 4 * j + 2 * h + e])
        code = (byte & 15 if i < block // 2 else byte >> 4) - 8
        assert code == int(codes[row, column])
    assert int(data[2, 0, 5, 0]) == 0x88, "rows of padding hold code 0"
    assert int(data[0, -1, 0, -1]) >> 4 == 8, "and so do columns"


@pytest.mark.parametrize(("group", "columns"), [(None, 128), (32, 96), (64, 128), (96, 128), (128, 128)])
def test_rows16_is_where_it_is_said_to_be(group, columns):
    weight = weight_of(qcore.Format("int8", group), 5, 77)
    data = pack(weight)["data"]
    assert data.shape == (16, columns)
    assert torch.equal(data[:5, :77], weight.data)
    assert not data[5:].any()
    assert not data[:, 77:].any()


@pytest.mark.parametrize("layout", [qcore.PLAIN, qcore.PLAIN_INT32])
def test_zero_points_are_in_the_domain_of_the_codes(layout):
    weight = weight_of(qcore.grouped_int4(32, symmetric=False), 8, 64)
    packed = pack(weight.convert(layout))
    assert same_bits(packed["zero"][:, :8].contiguous(), weight.zero)
    assert same_bits(packed["scale"][:, :8].contiguous(), weight.scale)


@pytest.mark.parametrize("text", ["int4-g32-asym", "int4-g64-fzp", "fp8-g32-e8m0", "fp4-g16-e4m3"])
def test_rows_of_parameters_begin_on_16_bytes(text):
    for n in (1, 15, 16, 17, 50):
        weight = qcore.quantize(torch.randn(n, 70), text)
        packed = pack(weight, sums=weight.format.zero is not qcore.ZeroPoint.FLOAT)
        for name in {"scale", "zero", "sums"} & packed.keys():
            assert packed[name].shape[1] == -(-n // 16) * 16
            assert packed[name].is_contiguous()
            assert not packed[name][:, n:].any()
        assert difference(unpack(packed, weight.format, n, 70), weight) == ""


@pytest.mark.parametrize("zero", list(qcore.ZeroPoint))
@pytest.mark.parametrize(("group", "k"), [(None, 77), (32, 77), (64, 128), (128, 5)])
def test_sums_of_codes_less_zero_points(zero, group, k):
    weight = weight_of(qcore.Format("int8", group, zero), 6, k)
    sums = group_sums(weight)
    assert sums.dtype == torch.int32
    expected = torch.zeros(weight.format.groups(k), 6, dtype=torch.int64)
    z = weight.zero if zero is qcore.ZeroPoint.INT else torch.zeros_like(expected)
    for column in range(k):
        g = column // weight.format.group(k)
        expected[g] += weight.codes()[:, column].long() - z[g].long()
    assert torch.equal(sums.long(), expected)


def test_group_sizes_without_a_block():
    assert not any(map(block_size, (1, 7, 31, 33, 48, 100)))


def test_groups_of_16_share_a_block_if_that_rounds_nothing():
    for text in ("fp4-g16-e4m3", "fp4-g16-e4m3d"):
        assert why_not_group(qcore.Format.parse(text)) == ""
    for text in ("fp4-g16", "fp4-g16-e8m0", "nf4-g16-e4m3", "int4-g16", "fp8-g16-e8m0"):
        assert "16 is not a multiple of 32" in why_not_group(qcore.Format.parse(text))
    weight = qcore.quantize(torch.randn(20, 40), "fp4-g16-e4m3")  # three groups, of which the last is ragged
    packed = pack(weight)
    assert packed["scale"].shape == (4, 32)
    assert packed["scale"].dtype == torch.int8
    assert difference(unpack(packed, weight.format, 20, 40), weight) == ""


@pytest.mark.parametrize("n", [1, 100, 128, 300])
def test_scales_of_square_blocks_are_found(n):
    weight = qcore.quantize(torch.randn(n, 256), "fp8-g128")
    scale = torch.rand(2, -(-n // 128)) + 0.5
    square = QTensor.from_codes(
        weight.codes(), scale.repeat_interleave(128, 1)[:, :n].contiguous(), None, weight.format
    )
    packed = pack(square, blocks=True)
    assert torch.equal(packed["blocks"], scale)
    assert difference(unpack(packed, weight.format, n, 256), square) == ""
    if n > 1:
        assert pack(weight, blocks=True)["blocks"].shape == (0,)


def test_names_tell_what_can_be_shared():
    int4, int8 = qcore.grouped_int4(32), qcore.Format("int8")
    assert packing_name(int4) == "triton.planar16"
    assert packing_name(int8, sums=True) == "triton.rows16+sums"


class Kernel(PackedKernel):
    def __call__(self, x, packed, bias):
        raise NotImplementedError


def test_a_kernel_packs_the_weight_that_it_was_made_for():
    fmt = qcore.grouped_int4(32)
    kernel = Kernel("cuda.test", fmt, 4, 64, sums=True)
    weight = weight_of(fmt, 4, 64)
    packed = kernel.pack(weight)
    assert set(packed) == {"data", "scale", "sums"}
    assert difference(kernel.unpack(packed), weight) == ""
    with pytest.raises(qcore.FormatError, match="was made for int4-g32/plain"):
        kernel.pack(weight_of(fmt, 5, 64))
    with pytest.raises(qcore.FormatError, match="cannot pack int8"):
        kernel.pack(weight_of(qcore.Format("int8"), 4, 64))


def test_a_weight_that_is_not_contiguous():
    weight = weight_of(qcore.Format("int8", 32, qcore.ZeroPoint.INT), 8, 64)
    strided = qcore.QTensor(
        weight.data.t().contiguous().t(), weight.scale.t().contiguous().t(), weight.zero.t().contiguous().t(),
        weight.shape, weight.format,
    )  # fmt: skip
    packed = pack(strided)
    assert all(tensor.is_contiguous() for tensor in packed.values())
    assert difference(unpack(packed, weight.format, 8, 64), weight) == ""


def spread_scales(low, high, groups=8, n=16):
    exponents = torch.randint(low, high, (groups, n)).float()
    return (torch.exp2(exponents) * (1 + torch.rand(groups, n))).bfloat16() * torch.randint(0, 2, (groups, n)).mul(
        2
    ).sub(1)


@pytest.mark.parametrize(("low", "high"), [(-12, 0), (-130, -104), (100, 120), (-27, 0)])
def test_float16_holds_codes_times_scales_in_units(low, high):
    torch.manual_seed(low)
    scale = spread_scales(low, high)
    units = units_of(scale)
    assert units.shape == (16,)
    assert (torch.frexp(units).mantissa == 0.5).all(), "powers of two"
    inverse = ((254 << 23) - units.view(torch.int32)).view(torch.float32)
    assert (inverse.double() * units.double() == 1).all(), "the kernel's way to invert them"
    for code in range(-8, 8):
        in_half = (scale.float() * units).half() * torch.tensor(code, dtype=torch.float16)
        assert torch.equal(in_half.double(), code * scale.double() * units.double())


@pytest.mark.parametrize("case", ["too small", "float32", "not finite"])
def test_scales_without_units(case):
    scale = spread_scales(-10, 0)
    assert units_of(scale).numel()
    if case == "float32":
        scale = scale.float()
    else:
        scale[0, 0], scale[1, 0] = (2.0**-31, 2.0) if case == "too small" else (float("inf"), 1.0)
    assert units_of(scale).numel() == 0


def test_a_zero_scale_and_a_zero_row_have_units():
    scale = spread_scales(-10, 0)
    scale[:, 0], scale[3, 1] = 0, 0
    assert units_of(scale).numel() == 16
