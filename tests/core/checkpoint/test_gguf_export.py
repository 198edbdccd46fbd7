"""Weights as blocks of GGUF: each type there and back, formats of qcore in the smallest type, and what is refused."""

import pytest
import torch
from foreign_layers import frozen

import qcore
from qcore import Format
from qcore.checkpoint.exporters.gguf_blocks import block_type, pack
from qcore.checkpoint.exporters.gguf_scales import factors
from qcore.checkpoint.importers.base import LayerRefused
from qcore.checkpoint.importers.gguf_blocks import BLOCK_TYPES
from qcore.weights.qtensor import QTensor

FROZEN = [name for name in BLOCK_TYPES if name != "MXFP4"]
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,)}
HALVES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}


def written(weight):
    """The type of the blocks of a weight, and what qcore reads in them."""
    name = block_type(lambda: iter([weight]))
    raw = pack(weight, name)
    assert raw.shape == (weight.shape[0], weight.shape[1] // BLOCK_TYPES[name].columns * BLOCK_TYPES[name].nbytes)
    return name, BLOCK_TYPES[name].build(raw)


def assert_same(one, other):
    assert torch.equal(one.dequantize(torch.float32), other.dequantize(torch.float32))


def made(format, codes, scale, zero=None):
    return QTensor.from_codes(codes, scale, zero, Format.parse(format))


@pytest.mark.parametrize("name", FROZEN)
def test_blocks_of_the_tool_come_back(name):
    raw = frozen(f"gguf_{name.lower()}").tensors["blk.0.attn_q.weight"]
    weight = BLOCK_TYPES[name].build(raw)
    found, again = written(weight)
    assert found == name
    assert_same(weight, again)
    if name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):  # K-quants have several factors of one product
        assert torch.equal(pack(weight, name), raw)


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("seed", range(4))
def test_any_blocks_come_back(name, seed):
    """Random bytes: every bit of codes, scales and minima, negative factors too."""
    generator = torch.Generator().manual_seed(seed)
    kind = BLOCK_TYPES[name]
    blocks = torch.randint(0, 256, (16, 2, kind.nbytes), dtype=torch.uint8, generator=generator)
    for at in HALVES[name]:
        sign = torch.randint(0, 2, (16, 2, 1), generator=generator) * 2 - 1
        number = torch.rand(16, 2, 1, generator=generator).clamp(min=0.1) * sign
        blocks[..., at : at + 2] = (number * (2.0**-8 if at in (2, 82) else 1)).half().view(torch.uint8)
    if name == "MXFP4":
        blocks[..., 0] = blocks[..., 0].clamp(100, 140)
    weight = kind.build(blocks.flatten(1))
    found, again = written(weight)
    assert BLOCK_TYPES[found].nbytes / BLOCK_TYPES[found].columns <= kind.nbytes / kind.columns
    assert_same(weight, again)


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("w4a16-g32", "Q4_0"),
        ("w4a16-g128", "Q4_0"),
        ("w4a16", "Q4_0"),
        ("w4a16-g128-asym", "Q5_0"),
        ("w8a16-g32", "Q8_0"),
        ("w8a16", "Q8_0"),
        ("mxfp4", "MXFP4"),
    ],
)
def test_schemes_of_qcore(scheme, name):
    torch.manual_seed(0)
    linear = torch.nn.Sequential(torch.nn.Linear(256, 48, bias=False)).half()
    qcore.quantize_(linear, scheme)
    found, again = written(linear[0].weight)
    assert found == name
    assert_same(linear[0].weight, again)


def test_zero_points_with_a_float16_minimum():
    torch.manual_seed(1)
    codes = torch.randint(-8, 8, (4, 64), dtype=torch.int8)
    scale, zero = (2.0 ** torch.randint(-6, 0, (2, 4))).half(), torch.randint(-8, 8, (2, 4), dtype=torch.int8)
    weight = made("int4-g32-asym", codes, scale, zero)
    found, again = written(weight)
    assert found == "Q4_1"
    assert_same(weight, again)


def test_small_codes_take_the_smaller_type():
    codes = torch.randint(-16, 16, (2, 32), dtype=torch.int8)
    codes[0, 0] = 15
    assert written(made("int8-g32", codes, torch.ones(1, 2).half()))[0] == "Q5_0"
    codes[0, 0] = 16
    assert written(made("int8-g32", codes, torch.ones(1, 2).half()))[0] == "Q8_0"


def test_several_weights_share_a_type():
    small = made("int8-g32", torch.zeros(2, 32, dtype=torch.int8), torch.ones(1, 2).half())
    large = made("int8-g32", torch.full((2, 32), 100, dtype=torch.int8), torch.ones(1, 2).half())
    assert block_type(lambda: iter([small, large])) == "Q8_0"


@pytest.mark.parametrize(
    ("format", "k", "scale", "why"),
    [
        ("int4-g32", 64, torch.full((2, 3), 1 / 3), "not exact in float16; round them: --dtype fp16"),
        ("int4-g32", 64, torch.full((2, 3), 1e6), "not exact in float16"),
        ("int4-g16", 64, torch.full((4, 3), 0.5), "do not fill blocks"),
        ("int4-g32", 48, torch.full((2, 3), 0.5), "do not fill blocks"),
        ("fp8", 64, torch.full((1, 3), 0.5), "blocks hold int4, int8 and mxfp4"),
    ],
)
def test_refusals(format, k, scale, why):
    parsed = Format.parse(format)
    codes = torch.full((3, k), 7, dtype=parsed.element.code_dtype)
    with pytest.raises(LayerRefused, match=why):
        written(made(format, codes, scale))


def test_refuses_groups_of_16_with_any_scale():
    torch.manual_seed(2)
    codes = torch.randint(-8, 8, (3, 256), dtype=torch.int8)
    with pytest.raises(LayerRefused, match="hold groups of 32"):
        written(made("int4-g16", codes, torch.rand(16, 3).half()))


def test_refuses_an_order_of_columns():
    codes = torch.zeros(2, 64, dtype=torch.int8)
    order = torch.arange(64, dtype=torch.int32).flip(0)
    weight = QTensor.from_codes(codes, torch.ones(2, 2).half(), None, Format.parse("int4-g32"), order=order)
    with pytest.raises(LayerRefused, match="order"):
        written(weight)


def test_refuses_zero_points_that_take_nine_bits():
    codes = torch.tensor([[127, -128] * 16] * 2, dtype=torch.int8)
    zero = torch.full((1, 2), -100, dtype=torch.int8)
    with pytest.raises(LayerRefused, match="9 bits"):
        written(made("int8-g32-asym", codes, torch.ones(1, 2).half(), zero))


def test_refuses_zero_points_that_are_no_products():
    torch.manual_seed(4)
    codes = torch.randint(-8, 8, (3, 256), dtype=torch.int8)
    with pytest.raises(LayerRefused, match="nor as the products"):
        written(made("int4-g32-fzp", codes, torch.rand(8, 3), torch.rand(8, 3)))


def test_factors_are_none_where_there_are_none():
    wanted = torch.tensor([[1.0, 2.0], [1.0, 3.14159]])
    zeros = torch.zeros_like(wanted)
    assert factors(zeros[:1], -wanted[:1], 0, 15) is not None
    assert factors(zeros, -wanted, 0, 15) is None
