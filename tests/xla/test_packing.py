"""Packed weights give every bit back, whatever their format and shape."""

from __future__ import annotations

import pytest
import torch

from qcore import Format, FormatError, QTensor, ScaleType, ZeroPoint
from qcore.contracts.inputs import Draw
from qcore.formats import PLAIN_INT32, effective_scale
from qcore.resolving.verification import difference
from qcore_xla import packing, tables

FORMATS = [
    Format(dtype, group, zero) for dtype in ("int4", "int8") for group in (None, 7, 32, 128, 300) for zero in ZeroPoint
]
TABLES = ["fp8", "fp8_e5m2-g128", "fp8-g32-e8m0", "fp4-g32-e8m0", "fp4-g16-e4m3", "fp4-g16-e4m3d", "nf4-g64"]
TABLES += ["fp4_bnb-g7-fzp", "int4-g32-asym-e8m0", "int8-g16-e4m3"]
FORMATS += map(Format.parse, TABLES)
SHAPES = [(1, 1), (3, 5), (20, 77), (70, 168), (16, 640)]


def weight(n, k, fmt):
    return Draw(torch.Generator().manual_seed(1)).weight(n, k, fmt, "codes")


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_nothing_is_lost(fmt, n, k):
    w = weight(n, k, fmt)
    for rows in (False, True):
        plan = packing.plan(n, k, fmt.bits, fmt.group_size, by_rows=rows)
        assert not difference(packing.unpack(packing.pack(w, plan), plan, fmt), w)
    table = tables.table_plan(n, k, fmt.bits, fmt.group_size)
    assert not difference(tables.unpack_table(tables.pack_table(w, table), table, fmt), w)


HEADS = [Format("int8"), Format("int4", 32, ZeroPoint.INT), Format.parse("fp4-g16-e4m3")]


@pytest.mark.parametrize("fmt", HEADS, ids=str)
def test_channel_groups(fmt):
    w = weight(12, 50, fmt)
    plan = packing.plan(12, 50, fmt.bits, fmt.group_size, heads=3)
    packed = packing.pack(w, plan, sums=True)
    assert packed["data"].shape[0] == 3
    assert packed["sums"].shape == (3, plan.groups, 4)
    assert not difference(packing.unpack(packed, plan, fmt), w)


def test_chunks_are_packed_like_the_whole(monkeypatch):
    w = weight(70, 168, Format("int4", 32))
    plan = packing.plan(70, 168, 4, 32)
    whole = packing.pack(w, plan, sums=True)
    monkeypatch.setattr(packing, "_CHUNK", 168 * 9)
    parts = packing.pack(w, plan, sums=True)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not difference(packing.unpack(parts, plan, w.format), w)


def test_int4_weights_take_half_a_byte_per_code():
    plan = packing.plan(4096, 4096, 4, 128)
    assert (plan.slices, plan.length, plan.rows) == (32, 128, 4096)
    data = packing.pack(weight(64, 1024, Format("int4", 128)), packing.plan(64, 1024, 4, 128))["data"]
    assert data.dtype == torch.int32
    assert data.nbytes == 64 * 1024 // 2


@pytest.mark.parametrize("text", ["fp4-g16-e4m3", "fp4-g32-e8m0"])
def test_scales_are_floats_of_16_bits(text):
    form = Format.parse(text)
    w = weight(64, 128, form)
    packed = packing.pack(w, packing.plan(64, 128, 4, form.group_size))
    factor = packed["factor"] if form.scale.has_global else 1.0
    assert packed["scale"].dtype == torch.bfloat16
    assert torch.equal(packed["scale"].float() * factor, w.scales())


@pytest.mark.parametrize("kind", [ScaleType.E8M0, ScaleType.E4M3, ScaleType.E4M3D])
def test_every_stored_scale_comes_back(kind):
    bits = torch.arange(255, dtype=torch.uint8)
    stored = bits if kind is ScaleType.E8M0 else bits[bits != 127].view(torch.float8_e4m3fn)
    floats = packing._float_scale(stored, kind)
    assert torch.equal(floats.float(), effective_scale(kind, stored, torch.ones(()), torch.float32))
    assert torch.equal(packing._stored_scale(floats, kind).view(torch.uint8), stored.view(torch.uint8))


def test_experts_are_stacked():
    each = [weight(20, 77, Format.parse("fp4-g16-e4m3")) for _ in range(3)]
    plan = packing.plan(20, 77, 4, 16)
    whole = packing.pack(QTensor.stack(each), plan)
    assert all(torch.equal(whole[name][1], part) for name, part in packing.pack(each[1], plan).items())


def test_words_hold_planes():
    words = packing.words_of(torch.arange(-8, 8, dtype=torch.int8))
    assert words.shape == (2,)
    assert [(int(words[0]) >> (4 * j)) & 15 for j in range(8)] == [(2 * j - 8) & 15 for j in range(8)]
    assert packing.codes_of(words).tolist() == list(range(-8, 8))


@pytest.mark.parametrize("k", [5, 100, 384, 4096])
def test_padding_stays_below_a_slice(k):
    for group in (None, 32, 128):
        plan = packing.plan(64, k, 4, group)
        assert k <= plan.columns < k + packing.SLICE


@pytest.mark.parametrize("group", [32, 64, None])
def test_sums_are_those_of_the_codes(group):
    w = weight(20, 77, Format("int4", group, ZeroPoint.INT))
    sums = packing.pack(w, packing.plan(20, 77, 4, group), sums=True)["sums"]
    groups = torch.split(w.codes().int(), group or 77, dim=1)
    assert sums.dtype == torch.int32
    assert torch.equal(sums[: len(groups), :20], torch.stack([part.sum(1) for part in groups]).int())
    assert not sums[:, 20:].any()
    assert not sums[len(groups) :].any()


def test_a_kernel_packs_only_what_it_was_made_for():
    class Packs(packing.PackedKernel):
        def __call__(self, x, packed, bias, **given):
            raise NotImplementedError

    kernel = Packs("xla.test", Format("int8"), 4, 8)
    for other in (weight(4, 9, Format("int8")), weight(4, 8, Format("int4"))):
        with pytest.raises(FormatError, match=r"xla\.test was made for int8/plain"):
            kernel.pack(other)


def test_other_layouts_come_back_in_their_own():
    w = weight(20, 77, Format("int4", 32, ZeroPoint.INT)).convert(PLAIN_INT32)
    plan = packing.plan(20, 77, 4, 32)
    back = packing.unpack(packing.pack(w, plan), plan, w.format)
    assert isinstance(back, QTensor)
    assert not difference(back, w)
