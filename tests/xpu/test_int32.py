"""The bytes that `aten.int4_mm` gets, against loops written from the text of `qcore_xpu.int32`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from xpu_problems import NARROW, random_weight

from qcore import PLAIN, PLAIN_INT32, QTensor, ZeroPoint
from qcore.resolving.verification import difference
from qcore_xpu import int32

FORMS = [
    "int4", "int4-asym", "int4-fzp", "int4-g128", "int4-g32-asym", "int4-g64-fzp", "int4-g20", "int4-g20-asym",
    "int4-g7-fzp", "int4-g48", "int4-g1-asym", "int4-g300", "int4-g96", "int4-g160-asym",
]  # fmt: skip
COLUMNS = [1, 5, 32, 77, 128, 168, 257]


def expected_words(codes, group, wide, step, bias):
    """Columns where the text says, eight to a word, lowest first; 8 as padding, 9 for the bias."""
    n, k = codes.shape
    groups = -(-k // group)
    words = np.zeros((n, (groups * wide + (step if bias else 0)) // 8), dtype=np.uint32)
    for row, word, place in itertools.product(range(n), range(words.shape[1]), range(8)):
        column = 8 * word + place
        g, inside = divmod(column, wide)
        source = g * group + inside
        if column >= groups * wide:
            unsigned = 9
        elif inside < group and source < k:
            unsigned = int(codes[row, source]) + 8
        else:
            unsigned = 8
        words[row, word] |= np.uint32(unsigned << 4 * place)
    return words.view(np.int32)


def widths(group, k, bias):
    """What a group becomes in the words, and the size of the op's groups."""
    group = min(group, k)
    wide = next(size for size in itertools.count(32, 32) if size >= group)
    powers = [2**i for i in range(32)]
    if not bias and (k <= group or wide in powers):
        return wide, wide
    return wide, next(size for size in (128, 64, 32) if wide % size == 0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", [PLAIN, PLAIN_INT32])
@pytest.mark.parametrize("form", FORMS)
def test_words_are_those_of_the_text(form, layout, bias):
    for k in COLUMNS:
        weight = random_weight(3, k, form, seed=k).convert(layout)
        group = weight.format.group_size or k
        wide, step = widths(group, k, bias)
        packed = int32.pack(weight, torch.bfloat16, bias=bias)
        expected = expected_words(weight.codes().numpy(), min(group, k), wide, step, bias)
        assert packed["data"].dtype == torch.int32
        assert np.array_equal(packed["data"].numpy(), expected), (k, wide, step)


@pytest.mark.parametrize("k", COLUMNS)
@pytest.mark.parametrize("form", FORMS)
def test_x_is_where_the_words_are(form, k):
    weight = random_weight(2, k, form)
    x = torch.arange(1, k + 1, dtype=torch.bfloat16).repeat(3, 1)
    for bias in (False, True):
        packed = int32.pack(weight, torch.bfloat16, bias=bias)
        shape = int32.Form.of(weight.format, k, bias=bias)
        spread = shape.spread(x, packed.get("tail"))
        assert spread.shape == (3, packed["data"].shape[1] * 8)
        # Codes told apart by their columns: what stands beside a value of x is its code.
        codes = int32.PLAIN_INT32.decode(packed["data"], spread.shape[1])
        products = (spread[0].double() * codes[:, : spread.shape[1]].double()).sum(1)
        ones = weight.codes().double() @ x[0].double()
        assert torch.equal(products, ones + bool(bias))


@pytest.mark.parametrize("form", FORMS)
def test_every_bit_comes_back(form):
    for k, layout, scale, dtype, bias in itertools.product(
        (5, 77, 256), (PLAIN, PLAIN_INT32), (torch.float32, *NARROW), NARROW, (False, True)
    ):
        weight = random_weight(5, k, form, scale_dtype=scale).convert(layout)
        back = int32.unpack(int32.pack(weight, dtype, bias=bias), weight.format, 5, k, bias=bias)
        assert not difference(back, weight), (k, layout, scale, dtype, bias)


@pytest.mark.parametrize("form", ["int4-g128", "int4-g32-asym"])
def test_a_weight_in_plain_int32_is_packed_as_it_is(form):
    weight = random_weight(8, 256, form, scale_dtype=torch.bfloat16).convert(PLAIN_INT32)
    packed = int32.pack(weight, torch.bfloat16)
    assert packed["data"].data_ptr() == weight.data.data_ptr()
    assert packed["scale"].data_ptr() == weight.scale.data_ptr()
    assert set(packed) == {"data", "scale", "zeros"}
    stored = torch.full_like(packed["zeros"], 8) if weight.zero is None else weight.zero
    assert torch.equal(packed["zeros"], stored)


def test_many_rows_are_packed_in_parts(monkeypatch):
    monkeypatch.setattr(int32, "_CHUNK", 200)
    weight = random_weight(9, 50, "int4-g20-asym")
    packed = int32.pack(weight, torch.float16)
    assert np.array_equal(packed["data"].numpy(), expected_words(weight.codes().numpy(), 20, 32, 32, bias=False))
    assert not difference(int32.unpack(packed, weight.format, 9, 50), weight)


def value(packed, form, k, group, n):
    """The weight that the op, ``after`` and ``rest`` amount to, float64 ``(N, K)``."""
    from qcore_xpu_stand_in.replacing import dense_int4

    factor = packed.get("factor", packed["scale"])
    dense = dense_int4(packed["data"], form.step, factor, packed["zeros"])[:, : form.columns]
    dense = dense.reshape(n, form.groups, form.wide)[..., : form.group]
    if "after" in packed or "levels" in packed:
        dense = dense * packed.get("after", packed.get("levels")).double().view(n, 1, 1)
    if "rest" in packed:
        dense = dense + packed["rest"].double().t().unsqueeze(-1)
    return dense.reshape(n, -1)[:, :k]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("form", FORMS)
def test_the_parts_amount_to_the_weight(form, dtype):
    n, k = 5, 257
    # Scales of x's dtype are exact; so is everything, then, but for the last bits of a float zero point.
    weight = random_weight(n, k, form, scale_dtype=dtype)
    found = value(int32.pack(weight, dtype), int32.Form.of(weight.format, k), k, weight.format.group(k), n)
    assert (found - weight.dequantize(torch.float64)).abs().max() <= 2.0**-24


def test_what_is_left_of_a_float_zero_point_is_half_a_step():
    weight = random_weight(16, 256, "int4-g32-fzp")
    steps = torch.rand(8, 16, generator=torch.Generator().manual_seed(1)) * 14 - 7
    weight = QTensor.from_codes(weight.codes(), weight.scale, steps * weight.scale, weight.format)
    packed = int32.pack(weight, torch.bfloat16)
    scale = weight.scale.bfloat16().float()
    assert (packed["rest"].abs() <= scale * 0.501).all()
    assert packed["rest"].abs().max() > scale.min() * 0.25


def test_a_float_zero_point_far_out_leaves_a_larger_rest():
    weight = random_weight(4, 64, "int4-g32-fzp")
    zero = torch.tensor([[0.0, 5.0, -5.0, 1e30], [1e-30, -1e30, 0.1, -0.1]])
    scale = torch.full_like(zero, 0.01)
    scale[0, 0] = 0
    far = QTensor.from_codes(weight.codes(), scale, zero, weight.format)
    packed = int32.pack(far, torch.bfloat16)
    assert packed["zeros"].tolist() == [[8, 0, 15, 0], [8, 15, 0, 15]]
    assert packed["rest"].isfinite().all()
    found = value(packed, int32.Form.of(far.format, 64), 64, 32, 4)
    expected = far.dequantize(torch.float64)
    # The op reads scales in bfloat16.
    assert ((found - expected).abs() <= 2.0**-7 * 0.01 * 8 + 2.0**-22 * expected.abs()).all()
    assert not difference(int32.unpack(packed, far.format, 4, 64), far)


@pytest.mark.parametrize(
    ("scale", "levelled"), [(2.0**-14, False), (2.0**11, False), (2.0**-15, True), (2.0**12, True), (1e-30, True)]
)
def test_scales_that_float16_does_not_hold_are_levelled(scale, levelled):
    weight = random_weight(4, 64, "int4-g32-asym")
    weight = QTensor.from_codes(weight.codes(), torch.full((2, 4), scale), weight.integer_zero(), weight.format)
    packed = int32.pack(weight, torch.float16)
    assert ("levels" in packed) == levelled
    factor = packed["factor"].float()
    if levelled:
        assert torch.equal(torch.frexp(packed["levels"]).mantissa, torch.full((4,), 0.5))
        assert ((factor >= 2.0**-10) & (factor <= 2.0**11)).all()
        assert torch.allclose(factor * packed["levels"], weight.scale, rtol=2.0**-11, atol=0)
    assert not {"after", "levels"} & set(int32.pack(weight, torch.bfloat16))


def test_scales_of_empty_groups_do_not_level_the_others():
    codes = torch.zeros(2, 64, dtype=torch.int8)
    codes[:, 32:] = 5
    scale = torch.tensor([[1.0, 1.0], [1e-6, 1e-7]])  # a group of zeros gets the scale 1
    weight = QTensor.from_codes(codes, scale, None, random_weight(1, 64, "int4-g32").format)
    packed = int32.pack(weight, torch.float16)
    assert packed["factor"][0].tolist() == [0, 0]
    assert torch.allclose(packed["factor"][1].float() * packed["levels"], scale[1], rtol=2.0**-11, atol=0)
    assert not difference(int32.unpack(packed, weight.format, 2, 64), weight)


def test_a_single_bfloat16_group_is_scaled_later_in_float32():
    weight = random_weight(4, 96, "int4-asym")
    packed = int32.pack(weight, torch.bfloat16)
    assert torch.equal(packed["after"], weight.scale[0])
    assert torch.equal(packed["factor"], torch.ones(1, 4, dtype=torch.bfloat16))
    narrow = random_weight(4, 96, "int4-asym", scale_dtype=torch.bfloat16)
    assert set(int32.pack(narrow, torch.bfloat16)) == {"data", "scale", "zeros"}


@pytest.mark.parametrize("form", ["int4", "int4-g512-asym"])
def test_long_groups_with_a_bias_become_several(form):
    weight = random_weight(4, 4096, form, scale_dtype=torch.bfloat16)
    packed = int32.pack(weight, torch.bfloat16, bias=True)
    assert packed["data"].shape == (4, (4096 + 128) // 8)
    assert packed["factor"].shape == (32, 4)
    assert packed["zeros"].shape == (33, 4)
    assert packed["tail"].shape == (1, 128)
    assert float(packed["tail"].sum()) == 1


def test_a_view_that_starts_between_64_bytes_is_copied():
    whole = torch.arange(64, dtype=torch.int32)
    assert int32.own(whole).data_ptr() == whole.data_ptr()
    assert int32.own(whole[16:]).data_ptr() == whole[16:].data_ptr()
    moved = int32.own(whole[3:])
    assert moved.storage_offset() == 0
    assert torch.equal(moved, whole[3:])
    assert int32.own(whole.view(8, 8).t()).is_contiguous()


@pytest.mark.parametrize("form", FORMS)
def test_weights_without_values_are_packed_as_well(form):
    weight = random_weight(6, 77, form)
    here, there = int32.pack(weight, torch.float16, bias=True), int32.pack(weight.to("meta"), torch.float16, bias=True)
    assert {name: (t.shape, t.dtype) for name, t in here.items()} == {
        name: (t.shape, t.dtype) for name, t in there.items()
    }
    back = int32.unpack(there, weight.format, 6, 77, bias=True)
    assert back.data.device.type == "meta"
    assert (back.zero is None) == (weight.format.zero is ZeroPoint.NONE)
