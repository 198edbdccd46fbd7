"""`QTensor` of every element, scale type, zero point and layout, over drawn shapes: cut, joined, regrouped, stacked.

Odd K, ragged groups, no experts, orders and scales of each dtype are drawn; every result is compared bit for bit.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcore.errors import FormatError
from qcore.formats import PLAIN, PLAIN_INT32, Format, ScaleType, ZeroPoint, find_element
from qcore.weights.activations import DynamicFP8, DynamicInt8, StaticFP8, StaticInt8
from qcore.weights.parts import parts
from qcore.weights.qtensor import QTensor
from qcore.weights.schemes import Scheme

ELEMENTS = ("int4", "int8", "fp8", "fp8_e5m2", "fp4", "nf4", "fp4_bnb")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def legal(dtype, zero, layout, scale):
    """Whether the four go together; the reasons are those of `Format`."""
    return (
        (zero is not ZeroPoint.INT or dtype.startswith("int"))
        and (zero is not ZeroPoint.FLOAT or scale is ScaleType.FLOAT)
        and (layout is PLAIN or dtype == "int4")
    )


COMBINATIONS = [c for c in itertools.product(ELEMENTS, ZeroPoint, (PLAIN, PLAIN_INT32), ScaleType) if legal(*c)]


@st.composite
def formats(draw):
    dtype, zero, layout, scale = draw(st.sampled_from(COMBINATIONS))
    return Format(dtype, draw(st.sampled_from([None, 1, 6, 7, 16, 32])), zero, layout, scale)


@st.composite
def shapes(draw, experts=(None, 0, 1, 3)):
    return draw(st.sampled_from(experts)), draw(st.integers(1, 9)), draw(st.integers(1, 70))


def scales_of(fmt, shape, rng, dtype):
    if fmt.scale is ScaleType.E8M0:
        return torch.randint(100, 150, shape, generator=rng, dtype=torch.uint8)
    values = torch.rand(shape, generator=rng) + 0.1
    if fmt.scale is ScaleType.FLOAT:  # of either sign, as GGUF has them
        return (values * torch.where(torch.rand(shape, generator=rng) < 0.5, -1.0, 1.0)).to(dtype)
    return (values * 100).to(torch.float8_e4m3fn)


def make(fmt, shape, seed=0, *, ordered=False, dtype=torch.float32):
    """A weight of codes that are drawn among all valid ones."""
    rng = torch.Generator().manual_seed(seed)
    experts, n, k = shape
    lead = () if experts is None else (experts,)
    low, high = fmt.element.code_range
    every = torch.arange(low, high + 1).to(fmt.element.code_dtype)
    every = every[torch.isfinite(fmt.element.decode(every))]
    codes = every[torch.randint(len(every), (*lead, n, k), generator=rng)]
    groups = (*lead, fmt.groups(k), n)
    scale, zero = scales_of(fmt, groups, rng, dtype), None
    if fmt.zero is ZeroPoint.INT:
        zero = torch.randint(low, high + 1, groups, generator=rng).to(torch.int8)
    if fmt.zero is ZeroPoint.FLOAT:
        zero = torch.randn(groups, generator=rng).to(dtype)
    order = torch.rand((*lead, k), generator=rng).argsort(-1).int() if ordered else None
    factor = torch.rand(lead, generator=rng) + 0.01 if fmt.scale.has_global else None
    return QTensor.from_codes(codes, scale, zero, fmt, "made", order, factor)


def same(a, b):
    """Whether two weights are equal, each tensor byte by byte."""
    mine, other = a.tensors(), b.tensors()
    return (a.format, tuple(a.shape), a.quantizer, list(mine)) == (
        b.format,
        tuple(b.shape),
        b.quantizer,
        list(other),
    ) and all(
        t.dtype == other[name].dtype
        and t.shape == other[name].shape
        and torch.equal(t.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name, t in mine.items()
    )


def dense(qt):
    return qt.dequantize(torch.float32)


def by_hand(qt):
    """The dense weight ``(N, K)`` in float32, column by column."""
    n, k = qt.shape
    fmt, codes = qt.format, qt.codes()
    table = fmt.element.values
    result = torch.empty(n, k)
    for j in range(k):
        g = j // fmt.group(k)
        values = torch.tensor([float(c) if table is None else table[c] for c in codes[:, j].tolist()])
        scale = qt.scale[g].float() if fmt.scale is not ScaleType.E8M0 else 2.0 ** (qt.scale[g].float() - 127)
        if fmt.scale is ScaleType.E4M3:
            scale = scale * qt.global_scale
        if fmt.scale is ScaleType.E4M3D:
            scale = scale / qt.global_scale
        if fmt.zero is ZeroPoint.INT:
            values = values - qt.integer_zero()[g].float()
        column = values * scale
        if fmt.zero is ZeroPoint.FLOAT:
            column = column + qt.zero[g].float()
        result[:, j if qt.order is None else int(qt.order[j])] = column
    return result


anything = {"fmt": formats(), "shape": shapes(), "seed": st.integers(0, 999), "ordered": st.booleans()}


@settings(deadline=None, max_examples=150)
@given(**anything, dtype=st.sampled_from(FLOATS))
def test_dequantized_as_the_formula_says(fmt, shape, seed, ordered, dtype):
    qt = make(fmt, shape, seed, ordered=ordered, dtype=dtype)
    each = [qt] if qt.dim() == 2 else [qt[e] for e in range(len(qt))]
    found = [dense(qt)] if qt.dim() == 2 else list(dense(qt))
    assert len(each) == len(found)
    for one, result in zip(each, found, strict=True):
        assert torch.equal(result, by_hand(one))


@settings(deadline=None, max_examples=150)
@given(**anything)
def test_what_is_built_again_is_the_same(fmt, shape, seed, ordered):
    qt = make(fmt, shape, seed, ordered=ordered)
    zero = qt.integer_zero() if fmt.zero is ZeroPoint.INT else qt.zero
    assert same(QTensor.from_codes(qt.codes(), qt.scale, zero, fmt, "made", qt.order, qt.global_scale), qt)
    assert same(pickle.loads(pickle.dumps(qt)), qt)
    assert same(copy.deepcopy(qt), qt)
    assert same(qt.to("cpu"), qt)
    assert same(qt.map(torch.clone), qt)
    assert tuple(qt.to("meta").shape) == tuple(qt.shape)
    assert Format.parse(str(fmt)) == fmt
    other = PLAIN_INT32 if fmt.dtype == "int4" and fmt.layout is PLAIN else PLAIN
    assert same(qt.convert(other).convert(fmt.layout), qt)
    assert torch.equal(dense(qt.convert(other)), dense(qt))


@settings(deadline=None, max_examples=150)
@given(**anything, data=st.data())
def test_rows_are_cut_and_joined_again(fmt, shape, seed, ordered, data):
    qt = make(fmt, shape, seed, ordered=ordered)
    n = qt.shape[-2]
    at = data.draw(st.integers(0, n))
    top, rest = qt.narrow(-2, 0, at), qt.narrow(-2, at, n - at)
    assert torch.equal(dense(top), dense(qt)[..., :at, :])
    assert torch.equal(dense(rest), dense(qt)[..., at:, :])
    assert same(QTensor.cat([top, rest], -2), qt)


@settings(deadline=None, max_examples=200)
@given(fmt=formats(), shape=shapes(), seed=st.integers(0, 999), data=st.data())
def test_columns_are_cut_at_groups_and_joined_again(fmt, shape, seed, data):
    qt = make(fmt, shape, seed)
    k = qt.shape[-1]
    g = fmt.group_size or 1
    cuts = sorted({*range(0, k, g), k})
    start, stop = sorted((data.draw(st.sampled_from(cuts)), data.draw(st.sampled_from(cuts))))
    part = qt.narrow(-1, start, stop - start)
    assert torch.equal(dense(part), dense(qt)[..., start:stop])
    part.validate()
    joined = QTensor.cat([qt.narrow(-1, 0, start), part, qt.narrow(-1, stop, k - stop)], -1)
    assert same(joined, qt)


@settings(deadline=None, max_examples=100)
@given(fmt=formats(), shape=shapes(), seed=st.integers(0, 999))
def test_columns_inside_a_group_and_of_an_order_stay(fmt, shape, seed):
    qt, k = make(fmt, shape, seed, ordered=True), shape[2]
    if k > 1:
        with pytest.raises(FormatError, match="with an order"):
            qt.narrow(-1, 0, 1)
    if fmt.group_size and 1 < fmt.group_size < k:
        with pytest.raises(FormatError, match="nearest legal cuts are 0 and"):
            make(fmt, shape, seed).narrow(-1, 0, 1)


@settings(deadline=None, max_examples=150)
@given(**anything, data=st.data())
def test_finer_groups_give_the_same_weight(fmt, shape, seed, ordered, data):
    qt = make(fmt, shape, seed, ordered=ordered)
    old = fmt.group_size or 64
    g = data.draw(st.sampled_from([d for d in range(1, old + 1) if old % d == 0]))
    finer = qt.regroup(g)
    assert finer.format == replace(fmt, group_size=g)
    assert torch.equal(dense(finer), dense(qt))
    finer.validate()
    if not ordered and qt.shape[-1] > g:
        assert torch.equal(dense(finer.narrow(-1, g, qt.shape[-1] - g)), dense(qt)[..., g:])


@settings(deadline=None, max_examples=100)
@given(fmt=formats(), shape=shapes(experts=(1, 3)), seed=st.integers(0, 999), ordered=st.booleans())
def test_experts_are_taken_out_and_stacked_again(fmt, shape, seed, ordered):
    qt = make(fmt, shape, seed, ordered=ordered)
    each = [qt[e] for e in range(len(qt))]
    assert same(QTensor.stack(each), qt)
    assert same(qt[-1], each[-1])
    first, rest = qt.narrow(0, 0, 1), qt.narrow(0, 1, len(qt) - 1)
    assert same(QTensor.cat([first, rest], 0), qt)
    empty = qt.narrow(0, 0, 0)
    assert dense(empty).shape == (0, *qt.shape[1:])
    assert same(QTensor.cat([empty, qt], 0), qt)


@settings(deadline=None, max_examples=150)
@given(fmt=formats(), shape=shapes(experts=(None,)), dtype=st.sampled_from(FLOATS))
def test_parts_describe_every_weight(fmt, shape, dtype):
    _, n, k = shape
    qt = make(fmt, shape, dtype=dtype)
    described = parts(fmt, n, k, dtype)
    assert [part.name for part in described] == list(qt.tensors())
    for part in described:
        tensor = qt.tensors()[part.name]
        assert (part.dtype, part.shape) == (tensor.dtype, tuple(tensor.shape))
        if part.n_dim is not None:
            assert part.shape[part.n_dim] == n
        if part.k_dim is not None:
            assert part.shape[part.k_dim] == -(-k // part.k_unit)


ACTIVATIONS = (
    None, DynamicInt8(), DynamicInt8(symmetric=False), StaticInt8(), StaticInt8(0.25, -3), StaticInt8(per_token=True),
    DynamicFP8(), DynamicFP8(32), StaticFP8(), StaticFP8(1e-7),
)  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_schemes_are_read_as_they_are_written(activation):
    read = 0
    for (dtype, zero, layout, scale), group in itertools.product(COMBINATIONS, (None, 32)):
        try:
            scheme = Scheme(Format(dtype, group, zero, layout, scale), activation=activation)
        except FormatError:
            continue
        assert Scheme.parse(str(scheme)) == scheme
        read += 1
    assert read


CODES = torch.zeros(2, 32, dtype=torch.uint8)
INTEGERS = CODES.to(torch.int8)
ONE = torch.ones(1, 2)
E4M3 = ONE.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("text", "change", "says"),
    [
        ("int4-g32", {"order": torch.tensor([0, 0, *range(2, 32)], dtype=torch.int32)}, "each of the features 0..31"),
        ("int4-g32", {"order": torch.arange(1, 33, dtype=torch.int32)}, "each of the features 0..31"),
        ("int4-g32", {"order": torch.arange(32)}, "order has dtype torch.int64"),
        ("int4-g32", {"order": torch.arange(31, dtype=torch.int32)}, "order has dtype torch.int32 and shape \\(31,\\)"),
        ("int4-g32", {"scale": torch.full((1, 2), float("inf"))}, "scale holds NaN or Inf"),
        ("int4-g32", {"scale": ONE.double()}, "scale has dtype torch.float64"),
        ("int4-g32", {"global_scale": torch.tensor(1.0)}, "needs none as global_scale"),
        ("int4-g32", {"zero": torch.zeros(1, 2, dtype=torch.int8)}, "but a zero point was given"),
        ("int4-g32-asym", {"zero": torch.full((1, 2), 8, dtype=torch.int8)}, "zero points span 8..8"),
        ("int4-g32-fzp", {"zero": torch.full((1, 2), float("nan"))}, "zero holds NaN or Inf"),
        ("fp4-g32", {"zero": torch.zeros(1, 2, dtype=torch.int8)}, "but a zero point was given"),
        ("fp4-g32", {"codes": CODES + 16}, "codes span 16..16; fp4 allows 0..15"),
        ("fp4-g32", {"codes": INTEGERS}, "they must be uint8"),
        ("fp8", {"codes": CODES + 0x7F}, "0x7f, which is NaN in fp8"),
        ("fp8_e5m2", {"codes": CODES + 0xFC}, "0xfc, which is Inf in fp8_e5m2"),
        ("fp4-g32-e8m0", {"scale": torch.full((1, 2), 255, dtype=torch.uint8)}, "255, which is NaN"),
        ("fp4-g32-e8m0", {"scale": ONE}, "this format needs uint8"),
        ("fp4-g32-e4m3", {"scale": E4M3}, "one float32 per weight"),
        ("fp4-g32-e4m3", {"scale": E4M3, "global_scale": torch.ones(1, 2)}, "global_scale has dtype"),
        ("fp4-g32-e4m3", {"scale": E4M3, "global_scale": torch.tensor(float("inf"))}, "must be finite"),
        ("fp4-g32-e4m3d", {"scale": E4M3, "global_scale": torch.tensor(0.0)}, "must be finite"),
        ("fp4-g32-e4m3d", {"scale": E4M3, "global_scale": torch.tensor(1e-45)}, "finite scales"),
        (
            "fp4-g32-e4m3",
            {"scale": torch.full((1, 2), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn), "global_scale": ONE[0, 0]},
            "scale holds NaN or Inf",
        ),
    ],
)
def test_bad_tensors_are_refused(text, change, says):
    fmt = Format.parse(text)
    fields = {"codes": INTEGERS if fmt.element.is_integer else CODES, "scale": ONE, "zero": None, **change}
    with pytest.raises(FormatError, match=says):
        QTensor.from_codes(format=fmt, **fields)


@pytest.mark.parametrize("element", [e for e in ELEMENTS if not find_element(e).is_integer])
def test_tables_have_no_integer_zero_point(element):
    with pytest.raises(FormatError, match="not integers"):
        Format(element, 32, ZeroPoint.INT)


@pytest.mark.parametrize("field", ["order", "global_scale"])
def test_rows_that_differ_in_what_they_share_are_not_joined(field):
    one, two = (make(Format.parse("fp4-g16-e4m3"), (None, 4, 32), seed, ordered=True) for seed in range(2))
    kept = "global_scale" if field == "order" else "order"
    two = two.derived(**{kept: getattr(one, kept)})
    with pytest.raises(FormatError, match=f"different {field}"):
        QTensor.cat([one, two], 0)
    assert tuple(QTensor.cat([one, two.derived(**{field: getattr(one, field)})], 0).shape) == (8, 32)


def test_columns_of_ordered_weights_are_joined():
    parts_of = [make(Format.parse("int4-g16"), (None, 3, 32), seed, ordered=seed > 0) for seed in range(3)]
    joined = QTensor.cat(parts_of, 1)
    joined.validate()
    assert torch.equal(dense(joined), torch.cat([dense(part) for part in parts_of], 1))


@pytest.mark.parametrize("ordered", [(True, False), (False, True)])
def test_experts_of_which_some_have_an_order_are_refused(ordered):
    each = [make(Format.parse("int4-g16"), (None, 3, 32), ordered=has) for has in ordered]
    with pytest.raises(FormatError, match="only some of them have an order"):
        QTensor.stack(each)


def test_parts_without_columns_follow_a_ragged_group():
    qt = make(Format.parse("int4-g16-asym"), (None, 3, 33))
    assert same(QTensor.cat([qt.narrow(1, 0, 0), qt, qt.narrow(1, 33, 0)], 1), qt)
    with pytest.raises(FormatError, match="K=33, which does not end at a group of 16"):
        QTensor.cat([qt, qt], 1)
