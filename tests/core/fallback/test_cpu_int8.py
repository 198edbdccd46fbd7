"""oneDNN's int8 product and ATen's: exactness, digits of float activations, and the faults that are kept out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import qcore
from qcore.fallback import codes, cpu_int8, cpu_w8a16, onednn
from qcore.formats import Format, ZeroPoint
from qcore.weights.activations import DynamicInt8
from qcore.weights.qtensor import QTensor
from qcore.weights.quantizers import quantize


@pytest.fixture
def fast(tools):
    def make(scheme, dtype=torch.bfloat16, **sizes):
        made = tools.linear(scheme, dtype, **sizes)
        name = f"torch.cpu.{scheme[:4] if scheme[3] == '8' else scheme[:5]}"
        if name not in made.kernels:
            pytest.skip("this CPU has no exact int8 product")
        made.kernel = made.kernels[name]
        return made

    return make


@pytest.mark.parametrize("k", [1, 5, 64, 1000])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_product_is_exact_at_the_extremes(k, rows):
    if not onednn.is_exact(8):
        pytest.skip("this CPU has no exact int8 product")
    weight = torch.full((33, k), -128, dtype=torch.int8)
    weight[1::2] = 127
    x = torch.full((rows, k), 255, dtype=torch.uint8)
    x[1::2] = 0
    y = onednn.int8_product(x, [onednn.prepack(weight)], torch.ones(1, 33), torch.zeros(33, dtype=torch.int32))
    assert torch.equal(y.double(), (x.double() - 128) @ weight.double().t())
    assert torch.equal(onednn.codes_of([onednn.prepack(weight)]), weight)


def test_saturating_instructions_are_found_out(tools):
    code = "from qcore.fallback import onednn; print(onednn.is_exact(8), onednn.is_exact(4))"
    assert tools.python(code, ONEDNN_MAX_CPU_ISA="AVX2").split() == ["False", "True"]


def test_a_cpu_without_vnni_is_still_served(tools):
    code = """
import torch
from qcore.contracts import CONTRACTS
from qcore.fallback import plugin
from qcore.weights.schemes import Scheme
contract = CONTRACTS["linear"]
for text in ("w8a16", "w8a8", "w8a8-static"):
    for case in contract.cases([Scheme.parse(text)], [torch.bfloat16]):
        if case.scheme == text:
            problem = case.build(5)
            kernel = plugin.qcore_linear(problem.request)[0].kernel
            result = kernel(problem.x, kernel.pack(problem.weight), problem.bias)
            assert contract.judge(problem, result).ok, case.id
    print(kernel.name)
"""
    names = tools.python(code, ONEDNN_MAX_CPU_ISA="AVX2").split()
    assert names == ["torch.cpu.int8pack", "torch.plain.linear", "torch.plain.linear"]


@pytest.mark.parametrize("scheme", ["w8a16", "w8a16-asym", "w8a16-g32-asym", "w8a16-g64-fzp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float_activations_are_multiplied_exactly(tools, fast, scheme, dtype):
    made = fast(scheme, dtype, k=512)
    for rows in (1, 7):
        assert tools.check(made.kernel, made.problem(rows, inputs="outliers")).worst < 0.5


@pytest.mark.parametrize("digits", [3, 4])
@pytest.mark.parametrize("rows", [1, 4])
def test_digits_add_up_to_the_activations(digits, rows):
    x = torch.randn(rows, 33) * torch.logspace(25, -25, rows)[:, None]
    values, scale, _ = codes.to_fixed_point(x, 8 * digits - 2)
    assert values.abs().max() <= 2.0 ** (8 * digits - 2)
    assert torch.equal(values, values.round())
    bytes_ = codes.digit_rows(values, digits).view(digits, rows, 33).double() - 128
    total = sum(digit * 256.0**i for i, digit in enumerate(bytes_))
    assert torch.equal(total, values.double())
    error = (values.double() * scale - x.double()).abs() / x.abs().amax(1, keepdim=True)
    assert error.max() <= 2.0 ** -(8 * digits - 3)


def test_digits_of_tiny_zero_and_infinite_rows():
    x = torch.tensor([[0.0, 0.0], [1e-40, -1e-45], [float("inf"), 1.0], [float("nan"), 1.0]])
    for rows in (x, x[:1], x[1:2], x[2:3], x[3:]):
        values, scale, _ = codes.to_fixed_point(rows, 22)
        result = values * scale
        finite = rows.isfinite().all(1)
        torch.testing.assert_close(result[finite], rows[finite], rtol=0, atol=1e-34)
        assert not result[~finite].isfinite().any()


SPARSE = ("dense", "one", "few", "holes")


def with_weights(weight, kind, generator):
    """``weight`` with most of its values 0: an output then depends on few elements of x, small ones too."""
    n, k = weight.shape
    drawn = torch.rand(n, k, generator=generator)
    kept = {"one": drawn == drawn.amax(1, keepdim=True), "few": drawn < 0.1, "holes": drawn[:1].expand(n, k) < 0.7}
    if kind not in kept:
        return weight
    zero = None if weight.zero is None else torch.zeros_like(weight.zero)
    return QTensor.from_codes(weight.codes() * kept[kind], weight.scale, zero, weight.format)


def uneven(kind, x):
    """x of float64 with the values of a row far apart."""
    largest = 3e4 if x.dtype == torch.float16 else 1e30
    spikes = {"1e2": 1e2, "1e4": 1e4, "1e6": 1e6, "largest": largest}
    if kind in spikes:
        x[:, x.shape[1] // 3] = min(spikes[kind], largest)
        return x
    changed = {
        "heavy": lambda v: v.double() ** 5,
        "wide": lambda v: v.double() * torch.logspace(-12, 12, v.shape[1], dtype=torch.float64),
        "tiny": lambda v: v.double() * 1e-37,
        "huge": lambda v: v.double() * 1e34,
        "relu": lambda v: v.clamp_min(0),
    }[kind](x)
    end = 3e4 if x.dtype == torch.float16 else 1e34
    return changed.double().clamp(-end, end).to(x.dtype)


@pytest.mark.parametrize("scheme", ["w8a16", "w8a16-asym", "w8a16-g32-fzp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_outliers_drown_nothing(tools, scheme, dtype):
    generator = torch.Generator().manual_seed(1)
    made = tools.linear(scheme, dtype, n=24, k=160)
    for kind in SPARSE:
        weight = with_weights(made.weight, kind, generator)
        packs = {name: kernel.pack(weight) for name, kernel in made.kernels.items() if "plain" not in name}
        assert ("torch.cpu.w8a16" in packs) is (dtype != torch.float64 and onednn.is_exact(8))
        for values in ("1e2", "1e4", "1e6", "largest", "heavy", "wide", "tiny", "huge", "relu"):
            for rows in (1, 3):
                x = uneven(values, torch.randn(rows, 160, generator=generator).to(dtype))
                problem = replace(made.problem(rows), x=x, weight=weight)
                for name, packed in packs.items():
                    tools.check(made.kernels[name], problem, packed)


def test_ordinary_rows_need_no_more_digits(fast):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made = fast("w8a16", dtype, n=64, k=4096)
        spread = float(made.kernel.pack(made.weight)["spread"])
        limit = made.kernel._limit + spread * 4096
        for x in (torch.randn(8, 4096), torch.rand(1, 4096)):
            assert len(cpu_w8a16._terms(x.to(dtype), made.kernel.digits, limit)) == 1


def test_one_row_and_many_agree(fast):
    made = fast("w8a8")
    packed = made.kernel.pack(made.weight)
    x = made.problem(5).x
    rows = torch.cat([made.kernel(row[None], packed, None) for row in x])
    torch.testing.assert_close(made.kernel(x, packed, None), rows, rtol=2**-8, atol=0)


def test_kernels_share_packed_tensors(fast):
    one, other = fast("w8a8"), fast("w8a8-aasym")
    assert one.kernel.packing == other.kernel.packing
    packed = one.kernel.pack(one.weight)
    assert other.kernel(torch.ones(2, 256).bfloat16(), packed, None).shape == (2, 48)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", [
    Format("int8"), Format("int8", 32, ZeroPoint.INT), Format("int4", 64, ZeroPoint.FLOAT), Format("int4", 96),
])  # fmt: skip
def test_unpacking_is_exact(tools, fmt, scale_dtype):
    weight = quantize(torch.randn(20, 200), fmt, scale_dtype=scale_dtype)
    made = tools.linear("w8a8", n=20, k=200)
    kernel = cpu_int8.kernel(type(made.request)(**{**vars(made.request), "weight": fmt}))
    if kernel is None:
        pytest.skip("this CPU has no exact int8 product")
    assert tools.same(kernel.unpack(kernel.pack(weight)), weight)


@pytest.mark.parametrize(("k", "offered"), [(256, True), (264, False), (16, True)])
def test_atens_product_is_kept_to_the_k_that_it_gets_right(tools, k, offered):
    assert ("torch.cpu.int8pack" in tools.linear("w8a16", torch.bfloat16, k=k).kernels) == offered
    assert "torch.cpu.int8pack" not in tools.linear("w8a16", torch.float32, k=k).kernels


@pytest.mark.parametrize("rows", [1, 23, 24, 100])
def test_atens_product(tools, rows):
    made = tools.linear("w8a16", torch.bfloat16, n=200)
    tools.check(made.kernels["torch.cpu.int8pack"], made.problem(rows, bias="float32"))


def test_atens_product_of_an_x_that_starts_anywhere(tools):
    """In a process of its own: the op crashes if x does not start at a multiple of 16 bytes."""
    code = """
import torch
import qcore
weight = qcore.quantize(torch.randn(48, 64), "int8/plain")
with qcore.using("torch"):
    layer = qcore.nn.QuantizedLinear.from_qtensor(weight, dtype=torch.bfloat16)
x = torch.randn(1 + 3 * 64).to(torch.bfloat16)[1:].view(3, 64)
print(layer.decision.selected.kernel, torch.equal(layer(x), layer(x.clone())))
"""
    assert tools.python(code, ONEDNN_MAX_CPU_ISA="AVX2").split() == ["torch.cpu.int8pack", "True"]


def test_without_the_op_nothing_is_offered(tools, monkeypatch):
    monkeypatch.setattr(onednn, "is_exact", lambda bits: False)
    assert "oneDNN" in cpu_int8.why_not(tools.linear("w8a8").request)


def test_cpu_instructions_are_tried_only_if_the_product_serves(tools, monkeypatch):
    def tried(bits):
        raise AssertionError("this costs 5 ms, and 30 while other programs are busy")

    monkeypatch.setattr(onednn, "is_exact", tried)
    int4 = tools.linear("w4a16-g32").request  # float activations and int4 weights are another kernel's
    assert cpu_int8.why_not(int4)
    with pytest.raises(AssertionError):
        cpu_int8.why_not(replace(int4, activation=DynamicInt8()))


@pytest.mark.parametrize("scheme", ["w8a8-aasym", "w8a8-g32-asym-aasym", "w4a8-g32-aasym", "w4a8-g32-asym-aasym"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_zeros_give_zeros(scheme, rows):
    layer = qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(512, 48, bias=False), scheme)
    x = torch.randn(rows + 1, 512)
    x[:rows] = 0
    with torch.no_grad():
        assert not layer(x)[:rows].any()
        assert not layer(x[:rows]).any()
