"""Norms, gates and residuals within products of one row, as a GPU runs them: values, and the steps that are left."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tiny_models import Decoder, RMSNorm, decoded
from torch import nn
from torch.nn import functional as F
from vulkan_problems import bring, place, vulkan  # noqa: F401

import qcore
from qcore import graphs
from qcore.weights.schemes import Scheme
from qcore_vulkan import builder, layout
from qcore_vulkan.builder import Builder, Place
from qcore_vulkan.steps import rows
from qcore_vulkan.steps.row_kernel import Around, Heads, RowGemv
from qcore_vulkan.steps.row_linear import row_kernel, row_linear

GATES = {"silu_mul": F.silu, "gelu_mul": F.gelu, "gelu_tanh_mul": lambda x: F.gelu(x, approximate="tanh")}
SCHEMES = [
    "w4a16-g32", "w4a16-g64-asym", "w4a16-g32-fzp", "w8a16", "w8a8", "w4a8-g32-asym", "wnf4a16-g64", "w4a16-g16-asym",
    "w8a8-g16",
]  # fmt: skip


@pytest.fixture(autouse=True)
def gpu(vulkan, monkeypatch):  # noqa: F811
    """The device as a GPU, whatever it is."""
    monkeypatch.setattr(vulkan, "profile", "gpu")


@pytest.fixture
def made(monkeypatch):
    """The programs that are made, by a function."""
    programs, plain = [], builder.Program

    def noted(*args):
        programs.append(plain(*args))
        return programs[-1]

    monkeypatch.setattr(builder, "Program", noted)
    return lambda: programs


@pytest.fixture
def names(made):
    """The names of the steps of the program that was made last, by a function."""
    return lambda: [step.name for step in made()[-1].steps]


def reference(x, other, eps, prologue):
    """What the product reads, in float64."""
    if prologue == "rms_norm":
        y = x * torch.rsqrt(x.pow(2).mean() + eps)
        return y if other is None else y * other
    return GATES[prologue](x) * other if prologue else x


def quantized(x):
    """A row as its own symmetric codes stand for it, float64."""
    scale = (x.float().abs().max() / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return ((x.float() / scale).round().clamp(-128, 127) * scale).double()


@pytest.mark.parametrize("prologue", ["", "rms_norm", *GATES])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_around_a_product(vulkan, scheme, prologue):  # noqa: F811
    draw = torch.Generator().manual_seed(7)
    of = Scheme.parse(scheme)
    for n, k, biased, has_other in ((33, 256, True, True), (8, 128, False, False)):
        x, other = torch.randn(2, k, generator=draw) * 3
        bias, residual = torch.randn(2, n, generator=draw)
        given = None if prologue == "" or (prologue == "rms_norm" and not has_other) else other
        weight = qcore.quantize(torch.randn(n, k, generator=draw) / k**0.5, of.weight)
        placed = layout.upload(vulkan, weight)
        found = row_kernel(
            vulkan, placed, of.activation, False, prologue=prologue, residual=not placed.geometry.is_table
        )
        kernel = replace(found, lanes=32 if biased else 64)
        added = None if placed.geometry.is_table else residual
        b, refs = Builder(vulkan), [bring(Builder(vulkan), 1, 4, torch.float32)]
        refs = [bring(b, 1, one.numel(), torch.float32) for one in (x, other, residual)]
        around = Around(prologue, None if given is None else refs[1].ref, 1e-6, None if added is None else refs[2].ref)
        buffer = vulkan.upload(bias) if biased else None
        y, out = row_linear(b, refs[0], kernel, placed, buffer, around), b.output(rows.rows_bytes(1, n, torch.float32))
        b.copy(y.ref, out)
        result = torch.empty(1, n)
        program = b.program([place(one) for one in refs], [place(replace(y, ref=out))])
        program.run([x[None], other[None], residual[None]], [result])
        read = reference(x.double(), None if given is None else other.double(), 1e-6, prologue)
        read = read if of.activation is None else quantized(read)
        expected = weight.dequantize().double() @ read + (bias if biased else 0) + (0 if added is None else added)
        tolerance = 1e-5 if of.activation is None else 2e-2  # a code may be the one beside it
        assert (result[0].double() - expected).norm() <= tolerance * expected.norm()
    assert vulkan.stats().messages == 0


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_rows_of_zeros_and_of_what_is_not_finite(vulkan, value):  # noqa: F811
    for scheme in ("w4a16-g32", "w8a8"):
        model = Block(scheme, 64, 96)
        x = torch.full((1, 1, 64), value)
        with torch.no_grad():
            found, expected = torch.compile(model, backend="qcore_vulkan")(x), model(x)
        torch.testing.assert_close(found, expected, equal_nan=True)


class Block(nn.Module):
    """Queries, keys and values of a norm, then a gated layer, with residuals."""

    def __init__(self, scheme, k, inner, *, bias=False, dtype=torch.float32, eps=1e-6, act=F.silu):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.act = RMSNorm(k, eps), RMSNorm(k, eps), act
        self.q, self.k, self.v, self.o = (nn.Linear(k, k, bias=bias) for _ in range(4))
        self.gate, self.up = (nn.Linear(k, inner, bias=bias) for _ in range(2))
        self.down = nn.Linear(inner, k, bias=bias)
        self.to(dtype)
        qcore.quantize_(self, scheme)

    def forward(self, x):
        y = self.first(x)
        x = x + self.o(self.q(y) * self.k(y) - self.v(y))
        y = self.second(x)
        return x + self.down(self.act(self.gate(y)) * self.up(y))


def check(model, x, dtype=torch.float32, tolerance=1e-5):
    """Whether the compiled model computes what torch does."""
    expected = copy.deepcopy(model)
    compiled = torch.compile(model, backend="qcore_vulkan")
    with torch.no_grad(), qcore.using("torch"):
        wanted = expected(x)
    with torch.no_grad():
        found = compiled(x)
    pairs = zip(*((one,) if isinstance(one, torch.Tensor) else one for one in (found, wanted)), strict=True)
    for own, want in pairs:
        assert own.dtype == want.dtype
        assert (own.double() - want.double()).norm() <= tolerance * want.double().norm()
    explained = graphs.explain(compiled)
    assert not explained.host
    assert explained.submissions == 1


pytestmark = pytest.mark.usefixtures("fresh_compiler")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a16-asym"])
def test_a_block_is_nothing_but_products(names, scheme, bias, dtype):
    check(Block(scheme, 64, 96, bias=bias, dtype=dtype), torch.randn(1, 1, 64).to(dtype), dtype, TOLERANCES[dtype])
    found = names()
    assert found.count("gemv_row_dot") + found.count("gemv_row_plain") == 7
    assert not {"rows"} & {*found}
    assert found.count("binary") == 2  # of queries, keys and values


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8-g32"])
def test_a_block_of_codes_is_nothing_but_products(names, scheme):
    check(Block(scheme, 64, 96), torch.randn(1, 64), tolerance=2e-2)
    assert not {"rows", "quantize"} & {*names()}


@pytest.mark.parametrize("act", GATES.values())
def test_gates_are_computed_in_products_of_one_row(names, act):
    check(Block("w8a16", 64, 96, act=act), torch.randn(1, 64))
    assert names().count("binary") == 2


@pytest.mark.parametrize(("k", "inner", "x"), [(77, 96, (1, 77)), (64, 96, (2, 64)), (64, 96, (1, 5, 64))])
def test_others_keep_their_steps(names, k, inner, x):
    """Columns that do not fill blocks, and several rows."""
    check(Block("w8a16", k, inner), torch.randn(x))
    assert "rows" in names()


def test_rows_that_shared_memory_does_not_hold(vulkan, names):  # noqa: F811
    k = vulkan.description.limits.shared_memory // 4
    model = nn.Sequential(RMSNorm(k), nn.Linear(k, 16, bias=False))
    for scheme, fused in (("w8a16", False), ("w8a8", True)):  # of codes it holds four times as many
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        qcore.quantize_(own, scheme)
        check(own, torch.randn(1, k), tolerance=1e-5 if scheme == "w8a16" else 2e-2)
        assert ("rows" not in names()) == fused


READERS = {
    "norm is returned": lambda m, x, y: (m.one(y), y),
    "norm is used elsewhere": lambda m, x, y: m.one(y) + y,
    "norm is viewed": lambda m, x, y: m.one(y.view(64)),
    "product is returned": lambda m, x, y: summed(m.one(y), x),
    "sum is returned": lambda m, x, y: used_again(m, m.one(y) + x),
    "sum of itself": lambda m, x, y: twice(m.one(y)),
    "sum of two products": lambda m, x, y: m.one(y) + m.two(y),
    "scaled": lambda m, x, y: torch.add(m.one(y), x, alpha=2) + torch.add(x, m.two(y), alpha=3),
    "residual is a number": lambda m, x, y: m.one(y) + 1.5,
    "residual is broadcast": lambda m, x, y: m.one(y) + x[..., :1],
    "residual broadcasts": lambda m, x, y: m.one(y) + x.expand(3, 64),
    "gate is returned": lambda m, x, y: with_product(m.two, F.silu(m.one(y)) * x),
    "gates of both": lambda m, x, y: m.two(F.silu(m.one(y)) * F.silu(x)),
    "gate by itself": lambda m, x, y: m.two(gated(m.one(y))) + x,
    "gate of another shape": lambda m, x, y: m.two(F.silu(m.one(y)) * x[..., :1]),
}


def twice(x):
    return x + x


def gated(x):
    return F.silu(x) * x


def summed(x, y):
    return x + y, x


def used_again(m, total):
    return total, m.two(total) + total


def with_product(layer, x):
    return layer(x), x


class Readers(nn.Module):
    """A norm, a gate and sums that others read as well."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(0)
        self.case, self.norm, self.one, self.two = case, RMSNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)
        qcore.quantize_(self, "w8a16")

    def forward(self, x):
        return READERS[self.case](self, x, self.norm(x))


@pytest.mark.parametrize("case", READERS)
def test_what_others_read_exists(case):
    check(Readers(case), torch.randn(1, 64))


class Overwritten(nn.Module):
    """The norm's x is a state that is written before the product reads it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.one = RMSNorm(512), nn.Linear(512, 64)
        self.register_buffer("kept", torch.randn(1, 512))
        qcore.quantize_(self, "w8a16")

    def forward(self, x):
        y = self.norm(self.kept)
        self.kept.index_copy_(0, torch.zeros(1, dtype=torch.int64), x)
        return self.one(y) + self.kept[:, :64]


def test_a_norm_of_what_is_overwritten_later():
    model = Overwritten()
    expected, compiled = copy.deepcopy(model), torch.compile(model, backend="qcore_vulkan")
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(1, 512)
            torch.testing.assert_close(compiled(x), expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.alternate
@torch.no_grad()
@pytest.mark.parametrize(("scheme", "bias"), [("w4a16-g32", False), ("w4a16-g32", True), ("w8a8", False)])
def test_levels_of_a_decoder_layer(made, scheme, bias):
    counts = {}
    for layers in (1, 2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Decoder(layers=layers, bias=bias).eval()
        qcore.quantize_(model, scheme)
        wanted = decoded(copy.deepcopy(model))
        found = decoded(torch.compile(model, backend="qcore_vulkan"))
        assert (found - wanted).norm() <= 2e-2 * wanted.norm()
        counts[layers] = sum(step.barrier for step in made()[-1].steps)
    assert counts[2] - counts[1] == 5  # q, k, v; attention; o; gate and up; down


HEADS = [
    ("w4a16-g32", 64, 3, True, True), ("w8a16-asym", 16, 5, True, False), ("w8a8", 32, 2, True, True),
    ("wnf4a16-g64", 48, 1, True, True), ("w8a16", 6, 4, False, True),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "size", "heads", "rotates", "caches"), HEADS)
def test_heads_that_are_rotated_and_placed(vulkan, scheme, size, heads, rotates, caches):  # noqa: F811
    draw, of, n, k = torch.Generator().manual_seed(3), Scheme.parse(scheme), heads * size, 128
    weight = qcore.quantize(torch.randn(n, k, generator=draw) / k**0.5, of.weight)
    x, bias = torch.randn(1, k, generator=draw), torch.randn(n, generator=draw)
    angles, cache = torch.randn(size, generator=draw), torch.randn(heads, 7, size, generator=draw)
    placed, row = layout.upload(vulkan, weight), 5
    kernel = row_kernel(vulkan, placed, of.activation, False, rotated=size if rotates else 0)
    b, whole = Builder(vulkan), lambda one: builder.Ref(vulkan.upload(one), 0, 4 * one.numel())
    target, rows_ = whole(cache), bring(b, 1, k, torch.float32)
    around = Heads(size, (whole(angles.cos()), whole(angles.sin())) if rotates else None)
    if caches:
        index = whole(torch.tensor([row], dtype=torch.int32))
        around = replace(around, out=target, row=index, stride=size, pitch=7 * size)
    y = row_linear(b, rows_, kernel, placed, vulkan.upload(bias), Around(heads=around))
    out = b.output(target.bytes if caches else 4 * n)
    b.copy(y.ref if caches else y.ref.part(0, 4 * n), out)
    found = torch.empty(heads, 7 if caches else 1, size)
    b.program([place(rows_)], [Place(out, 1, out.bytes, out.bytes)]).run([x], [found.view(1, -1)])
    read = x[0].double() if of.activation is None else quantized(x[0].double())
    product = (weight.dequantize().double() @ read + bias).view(heads, size)
    if rotates:
        turned = torch.cat((-product[:, size // 2 :], product[:, : size // 2]), -1)
        product = product * angles.cos() + turned * angles.sin()
    wanted = cache.double() if caches else product.unsqueeze(1)
    if caches:
        wanted[:, row] = product
    assert (found.double() - wanted).norm() <= 1e-5 * wanted.norm()


class Turned(nn.Module):
    """Heads of products, rotated and copied into a cache in the ways of `TURNS`."""

    def __init__(self, turn, size, heads):
        super().__init__()
        torch.manual_seed(0)
        self.turn, self.size, self.heads = turn, size, heads
        self.one, self.two = (nn.Linear(64, heads * size) for _ in range(2))
        self.register_buffer("cache", torch.randn(1, heads, 9, size))
        qcore.quantize_(self, "w8a16")

    def split(self, y):
        return y.view(1, y.shape[1], self.heads, self.size).transpose(1, 2)

    def forward(self, x, row):
        angles = row[:, None].float() * torch.arange(1, self.size + 1) / self.size
        cos, sin = angles.cos()[None, None], angles.sin()[None, None]
        return TURNS[self.turn](self, self.split(self.one(x)), cos, sin, row, x)


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def copied(cache, row, x):
    cache.index_copy_(2, row, x)
    return cache.sum(-1)


TURNS = {
    "rotated": lambda m, y, cos, sin, row, x: rotated(y, cos, sin).sum(-1),
    "into a cache": lambda m, y, cos, sin, row, x: copied(m.cache, row, y),
    "both": lambda m, y, cos, sin, row, x: copied(m.cache, row, rotated(y, cos, sin)),
    "returned": lambda m, y, cos, sin, row, x: (copied(m.cache, row, y), y),
    "rotated and returned": lambda m, y, cos, sin, row, x: (rotated(y, cos, sin), y),
    "cache read before": lambda m, y, cos, sin, row, x: m.cache.sum(-1) + copied(m.cache, row, y),
    "cache read between": lambda m, y, cos, sin, row, x: between(m, y, row, x),
    "twice": lambda m, y, cos, sin, row, x: copied(m.cache, row, y) + copied(m.cache, row - 1, m.split(m.two(x))),
    "another row": lambda m, y, cos, sin, row, x: copied(m.cache, (y.sum() * 0).long().view(1) + row, y),
    "into a view": lambda m, y, cos, sin, row, x: copied(m.cache[:, :, 1:], row, y),
    "turned by itself": lambda m, y, cos, sin, row, x: rotated(y, y.abs(), sin),
}


def between(m, y, row, x):
    before = m.cache * x.sum()
    return copied(m.cache, row, y) + before.sum(-1)


@torch.no_grad()
@pytest.mark.parametrize(("size", "heads", "length"), [(16, 2, 1), (32, 1, 1), (8, 4, 1), (16, 2, 3)])
@pytest.mark.parametrize("turn", TURNS)
def test_heads_of_a_graph(turn, size, heads, length):
    model = Turned(turn, size, heads)
    expected = copy.deepcopy(model)
    compiled = torch.compile(model, backend="qcore_vulkan")
    for at in (3, 4):
        x, row = torch.randn(1, length, 64), torch.arange(at, at + length)
        found, wanted = compiled(x, row), expected(x, row)
        for own, want in zip(*(one if isinstance(one, tuple) else (one,) for one in (found, wanted)), strict=True):
            torch.testing.assert_close(own, want, rtol=1e-4, atol=1e-4)
    graphs.synchronize(model)
    torch.testing.assert_close(model.cache, expected.cache, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("turn", "buffers", "left"), [("rotated", 12, "rope"), ("both", 12, "rope_index"),
    ("into a cache", 12, "indexed"), ("both", 8, None)])  # fmt: skip
def test_heads_take_no_step_where_shaders_see_enough(vulkan, monkeypatch, names, turn, buffers, left):  # noqa: F811
    limits = replace(vulkan.description.limits, storage_buffers=buffers)
    monkeypatch.setattr(vulkan, "description", replace(vulkan.description, limits=limits))
    torch.compile(Turned(turn, 16, 2), backend="qcore_vulkan")(torch.randn(1, 1, 64), torch.tensor([3]))
    found = {*names()}
    assert any(name.startswith("gemv_row_placed") for name in found) == (buffers > 8)
    assert left not in found
    assert ("rope_index" in found) == (buffers == 8)


def test_tables_add_no_residual(vulkan):  # noqa: F811
    """The binding of the residual is the table's."""
    weight = layout.upload(vulkan, qcore.quantize(torch.randn(16, 64), Scheme.parse("wnf4a16-g64").weight))
    assert row_kernel(vulkan, weight, None, False, residual=True) is None
    assert isinstance(row_kernel(vulkan, weight, None, False, prologue="rms_norm"), RowGemv)
