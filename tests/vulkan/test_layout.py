"""How weights lie in device memory: the documented place of each code, and back again bit for bit."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from vulkan_problems import vulkan  # noqa: F401
from vulkan_weights import same, weight_of

from qcore import PLAIN_INT32, Format, QTensor, ZeroPoint
from qcore_vulkan import layout
from qcore_vulkan.layout import Geometry, Packed, download, pack, unpack, upload, why_not_packed

FORMATS = (
    "int8", "int8-asym", "int8-fzp", "int8-g32", "int8-g64-asym", "int8-g5-fzp", "int4", "int4-asym", "int4-fzp",
    "int8-g16", "int8-g16-fzp", "int4-g16-asym", "int4-g9-fzp",
    "int4-g32", "int4-g48-asym", "int4-g128-fzp", "int4-g32-asym/plain_int32", "int4/plain_int32",
)  # fmt: skip
SHAPES = ((1, 1), (3, 5), (8, 32), (20, 77), (33, 168), (129, 256))


def geometry(weight: QTensor) -> Geometry:
    return Geometry.of(weight.format, *weight.shape)


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpacked_is_what_was_packed(text, shape):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = weight_of(text, *shape, dtype)
        g = geometry(weight)
        assert same(unpack(pack(weight, g), weight.format, g, dtype), weight)


def stored_code(packed: Packed, g: Geometry, n: int, k: int) -> int:
    """The code of (n, k), by the formula of the module's docstring."""
    group, column = divmod(k, g.group)
    block, column = divmod(group * g.steps * 16 + column, 32)
    p, each = g.bits // 4, 16 if g.bits == 8 else 32
    total = g.row_blocks
    vector = ((n // 8) * total + block) * 8 * p + 8 * (column // each) + n % 8
    data = packed.codes.view(torch.uint8).view(-1, 16)[vector].tolist()
    if g.bits == 8:
        value = data[column % 16]
        return value - 256 if value > 127 else value
    word, place = divmod(column, 8)
    byte = data[4 * word + place % 4]
    return (byte >> 4 if place >= 4 else byte & 15) - 8


@pytest.mark.parametrize("text", ["int8-g40", "int4-g40", "int8", "int4", "int8-g16", "int4-g16", "int4-g7"])
def test_codes_are_where_the_docstring_says(text):
    weight = weight_of(text, 11, 93)
    g = geometry(weight)
    packed, codes = pack(weight, g), weight.codes().tolist()
    assert all(stored_code(packed, g, n, k) == codes[n][k] for n in range(11) for k in range(93))
    assert packed.codes.numel() * 4 == 16 * g.row_bytes  # two times eight rows


@pytest.mark.parametrize("text", ["int8-g40-asym", "int4-g40-asym", "int4-fzp", "int8", "int8-g32-asym"])
def test_parameters_and_sums(text):
    weight = weight_of(text, 11, 93)
    g = geometry(weight)
    packed = pack(weight, g)
    offset = 8 if g.bits == 4 else 0
    stored = torch.nn.functional.pad(weight.codes().int() + offset, (0, g.groups * g.group - 93))
    assert torch.equal(packed.sums[:, :11], stored.view(11, g.groups, g.group).sum(-1).t().int())
    assert torch.equal(packed.scale[:, :11], weight.scale)
    assert packed.scale.shape == packed.sums.shape == (g.groups, 16)
    if weight.format.zero is ZeroPoint.INT:
        assert torch.equal(packed.zero[:, :11], weight.integer_zero().int() + offset)
    elif weight.format.zero is ZeroPoint.FLOAT:
        assert torch.equal(packed.zero[:, :11], weight.zero)


@pytest.mark.parametrize(("text", "k", "group", "split"), [("int8", 40000, 16384, 3), ("int4-g32768", 70000, 16384, 2)])
def test_long_groups_are_cut(text, k, group, split):
    weight = weight_of(text, 3, k)
    g = geometry(weight)
    assert (g.group, g.split) == (group, split)
    assert same(unpack(pack(weight, g), weight.format, g, torch.float32), weight)


def test_many_codes_are_packed_in_chunks(monkeypatch):
    weight = weight_of("int4-g32-asym", 40, 96)
    whole = pack(weight, geometry(weight))
    monkeypatch.setattr(layout, "_CHUNK", 8 * 96)
    cut = pack(weight, geometry(weight))
    pairs = [
        (getattr(whole, f.name), getattr(cut, f.name)) for f in fields(Packed) if f.name not in ("n", "scale_bytes")
    ]
    assert all(torch.equal(one, other) for one, other in pairs)


def test_weights_without_a_place():
    assert "multiple of 32" in why_not_packed(Format("int8", 16385), 40000)
    assert not why_not_packed(Format("int8", 32768), 70000)
    assert not why_not_packed(Format("int4", 7), 70)


@pytest.mark.parametrize("text", ["int8-asym", "int4-g32-asym/plain_int32", "int4-g32-fzp"])
def test_a_weight_comes_back_from_the_device(vulkan, text, monkeypatch):  # noqa: F811
    weight = weight_of(text, 45, 77, torch.bfloat16)
    before = vulkan.stats().buffers
    whole = upload(vulkan, weight)
    assert len(whole.parts) == 1
    assert whole.nbytes == sum(buffer.nbytes for buffer in whole.parts[0].buffers)
    monkeypatch.setattr(layout, "rows_per_part", lambda *_: 16)
    cut = upload(vulkan, weight)
    assert [(part.first, part.n) for part in cut.parts] == [(0, 16), (16, 16), (32, 13)]
    assert same(download(whole), weight)
    assert same(download(cut), weight)
    assert weight.format.layout != PLAIN_INT32 or download(cut).data.dtype == torch.int32
    del whole, cut
    assert vulkan.stats().buffers == before


def test_parts_are_no_larger_than_a_shader_can_see():
    g = Geometry.of(Format("int4"), 1000, 4096)
    assert layout.rows_per_part(g, 1 << 20) * g.row_bytes == 1 << 20
    assert layout.rows_per_part(g, 1000) == 8
