"""Tables, their kinds of scales and e4m3 activations in Triton's interpreter, against the contracts and by the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_problems import assert_right, float_product, linear_problem, packed_weight
from cuda_stand_ins import dense
from grids import sampled

import qcore
from qcore.contracts import EMBEDDING, LINEAR
from qcore.weights.activations import fp8_scale, quantize_fp8
from qcore.weights.schemes import TABLE_SCHEMES, Scheme

pytest.importorskip("triton")

A16 = [scheme for scheme in TABLE_SCHEMES if "a16" in scheme] + ["wnf4a16-g64-fzp", "wfp4a16", "wfp8a16-g64-fzp"]
AFP8 = ["wfp8afp8", "wfp8afp8-g128", "wfp8afp8-static", "w4afp8-g32-asym", "wnf4afp8-g64", "wfp8afp8-g32"]
HALF = ["w8afp8-g128", "w8afp8-g64-asym-token", "w8afp8-g32-token", "w4afp8-g64-token", "w8a16-g64-asym"]
SIZES = ((1, 20, 77), (17, 33, 168), (2, 129, 5), (40, 16, 64), (3, 16, 40))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize(("scheme", "m", "n", "k"), sampled([(s, *size) for s in (*A16, *AFP8) for size in SIZES], 24))
def test_the_kernel_of_a_scheme_is_right(interpreter, scheme, m, n, k):
    from qcore_cuda.linear import kernel

    dtype = DTYPES[(m + n) % 3]
    case = linear_problem(
        scheme, m, n, k, dtype, "same" if m > 2 else "none", strides="columns" if n == 33 else "dense"
    )
    mine = kernel(case.request)
    assert_right(case, mine.run(case.x, mine.pack(case.weight), case.bias))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 31), (2, 33, 129), (16, 40, 256), (40, 20, 200)])
@pytest.mark.parametrize("scheme", HALF)
def test_a_power_of_two_of_scales_comes_back(interpreter, scheme, m, n, k):
    """Every product that may take such a weight knows its factor."""
    from qcore_cuda.linear import kernel

    for dtype in DTYPES[:2]:
        case = linear_problem(scheme, m, n, k, dtype, "same")
        mine = kernel(case.request)
        packed = mine.pack(case.weight)
        assert ("factor" in packed) == (scheme != "w8a16-g64-asym" or dtype == torch.float16)
        assert_right(case, mine.run(case.x, packed, case.bias))


@pytest.mark.parametrize(("scheme", "name"), sampled([(s, k) for s in A16 for k in ("gemm", "scaled", "dense")], 12))
def test_every_product_is_right(interpreter, scheme, name):
    from qcore_cuda.products.dense import DENSE, Whole
    from qcore_cuda.products.gemm import GEMM, Tile

    case = linear_problem(scheme, 17, 40, 300, torch.bfloat16, "same")
    weight = packed_weight(case)[0]
    product, config = {
        "gemm": (GEMM, Tile(64, 32, stages=2, scaled="g16" in scheme)),
        "scaled": (GEMM, Tile(64, 16, stages=2, unroll=2, scaled=True, split=2)),
        "dense": (DENSE, Whole()),
    }[name]
    assert_right(case, float_product(case, weight, product, config))


CASES = [
    case
    for scheme in ("wfp8a16", "wfp8_e5m2a16", "mxfp4", "nvfp4", "wfp4a16-g16-e4m3d", "nf4", "mxfp8", "wfp4_bnba16-g64")
    for case in EMBEDDING.cases([Scheme.parse(scheme)], [torch.bfloat16, torch.float32])
]


@pytest.mark.parametrize("case", sampled(CASES, 20), ids=lambda case: case.id)
def test_embeddings_are_right(interpreter, case):
    from qcore_cuda.embedding import CudaEmbedding

    problem = case.build(seed=3)
    if problem.x.numel() > 12:
        problem = replace(problem, x=problem.x.flatten()[:12])
    mine = CudaEmbedding(problem.request)
    verdict = EMBEDDING.judge(problem, mine(problem.x, mine.pack(problem.weight), None))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("text", ["fp8", "fp8_e5m2", "fp4-g32", "nf4-g32", "fp4_bnb-g32"])
def test_every_code_is_its_number(interpreter, text):
    from qcore_cuda.products.dense import dequantized
    from qcore_triton.packing import pack, weight_of

    form = qcore.Format.parse(text)
    element = form.element
    codes = [code for code, value in enumerate(element.values) if abs(value) < float("inf")]
    codes = torch.tensor(codes, dtype=torch.uint8).repeat(16).view(16, -1)
    weight = qcore.QTensor.from_codes(codes, torch.ones(form.groups(codes.shape[1]), 16), None, form)
    found = dequantized(weight_of(pack(weight), form, *codes.shape), torch.float32)
    assert torch.equal(found, element.decode(codes))
    assert torch.equal(torch.signbit(found), torch.signbit(element.decode(codes)))


@pytest.mark.parametrize("kind", ["e8m0", "e4m3"])
def test_every_scale_is_its_number(interpreter, kind):
    from qcore_cuda.products.dense import dequantized
    from qcore_triton.packing import pack, weight_of

    form = qcore.Format.parse(f"fp4-g32-{kind}")
    bits = torch.arange(255 if kind == "e8m0" else 256, dtype=torch.uint8)
    bits = bits[(bits & 0x7F) != 0x7F] if kind == "e4m3" else bits
    scale = bits.view(1, -1) if kind == "e8m0" else bits.view(torch.float8_e4m3fn).view(1, -1)
    codes = torch.full((bits.numel(), 32), 2, dtype=torch.uint8)  # 1.0
    whole = None if kind == "e8m0" else torch.tensor(0.37)
    weight = qcore.QTensor.from_codes(codes, scale, None, form, global_scale=whole)
    found = dequantized(weight_of(pack(weight), form, *codes.shape), torch.float32)
    assert torch.equal(found, weight.dequantize(torch.float32))


SPECIAL = (0.0, -0.0, 1e-30, 448.0, 464.0, 465.0, -1e9, 2.0**-10, 3 * 2.0**-10, 2.0**-6, 0.0146484375, 17.0, 19.0)


@pytest.mark.parametrize("static", [None, 1.0, 0.013])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_are_quantized_as_the_contract_says(interpreter, static, dtype):
    from qcore_cuda import fp8
    from qcore_cuda.runtime.device import device_of

    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(7, 300, generator=generator) * torch.logspace(-6, 6, 7)[:, None]).to(dtype)
    x[2] = 0
    x[3, : len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)
    x[4, 5], x[5, 9] = float("nan"), float("inf")
    activation = qcore.DynamicFP8() if static is None else qcore.StaticFP8(static)
    scale = fp8_scale(activation, x).expand(7, 1)
    expected = quantize_fp8(x, scale)
    with np.errstate(invalid="ignore"):  # NaN, where it belongs
        codes, mine = fp8._by_row(x, 320, torch.uint8, static, device_of(x.device))
    torch.testing.assert_close(mine[:, None], scale, rtol=0, atol=0, equal_nan=True)
    codes, rest = codes[:, :300].view(torch.float8_e4m3fn), codes[:, 300:]
    assert not rest[scale[:, 0].isfinite()].any()
    whole = scale.isfinite().expand(x.shape) & ~x.isnan()
    # Quotients next to a tie may take either of two neighbours.
    off = (codes.view(torch.uint8).int() - expected.view(torch.uint8).int())[whole].abs()
    assert off.max() <= 1
    assert off.float().mean() < 0.01
    assert torch.equal((codes.float() * mine[:, None]).isnan(), (expected.float() * scale).isnan())


@pytest.mark.parametrize("group", [32, 96, 128])
def test_groups_of_activations_have_scales_of_their_own(interpreter, group):
    from qcore_cuda import fp8
    from qcore_cuda.runtime.device import device_of

    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 300)
    scale = fp8_scale(qcore.DynamicFP8(group), x)
    expected = quantize_fp8(x, scale).double() * scale.double()
    numbers, found = fp8._by_group(x, 300, group, torch.float32, device_of(x.device))
    assert torch.equal(found.t().repeat_interleave(group, 1)[:, :300], scale)
    torch.testing.assert_close(numbers.double(), expected, rtol=2**-3, atol=0)
    assert ((numbers.double() - expected).abs() > 2**-22 * expected.abs()).float().mean() < 0.01


@pytest.mark.parametrize(("group", "k"), [(32, 300), (96, 300), (128, 2500), (50, 99)])
@pytest.mark.parametrize("skew", [0, 6])
def test_groups_are_numbers_in_a_unit_of_the_row(interpreter, group, k, skew):
    from qcore_cuda import fp8
    from qcore_cuda.runtime.device import device_of

    columns = -(-k // 8) * 8
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(k)) * torch.logspace(-skew, skew, k)
    x *= torch.tensor([1.0, 1e-30, 1e30, 0.0, 1.0])[:, None]
    x[4, 7] = float("nan")
    scale = fp8_scale(qcore.DynamicFP8(group), x)
    expected = quantize_fp8(x, scale).double() * scale.double()
    numbers, unit = fp8._numbers(x, columns, group, device_of(x.device))
    assert (numbers.dtype, numbers.shape, unit.dtype, unit.shape) == (torch.float16, (5, columns), torch.float32, (5,))
    assert torch.equal(torch.frexp(unit).mantissa, torch.full((5,), 0.5))
    assert not numbers[:, k:].any()
    assert ((numbers[:3].abs().amax(1) >= 2**13) & (numbers[:3].abs().amax(1) <= 2**15)).all()
    found = numbers[:, :k].double() * unit.double()[:, None]
    assert found[4].isnan().any()
    # Few codes differ, next to ties; numbers far below the largest are multiples of a smaller one.
    error, least = (found[:4] - expected[:4]).abs(), 2**-38 * expected[:4].abs().amax(1, keepdim=True)
    assert (error <= 2**-3 * expected[:4].abs() + least).all()
    assert (error > 2**-11 * expected[:4].abs() + least).float().mean() < 0.01


FORM = {
    "element": "e4m3",
    "packed": (4096, 4096),
    "groups": 1,
    "zero": None,
    "n": 4096,
    "k": 4096,
    "bits": 8,
    "group": 4096,
}
INT4 = {"element": "int", "bits": 4, "packed": (256, 32, 16, 64)}


@pytest.mark.parametrize(
    ("way", "change"),
    [
        ("fp8_hopper", {}), ("fp8_hopper", {"m": 9}), ("tokens", {"m": 8}),
        ("fp8_hopper", {"out": torch.float16, "bias": torch.float32}),
        ("fp8_hopper", {"x": 128, "group": 128, "groups": 32}), ("fp8_hopper", {"k": 4032}),
        *(("fp8_hopper" if m > 16 else "tokens", {"x": 128, "group": 128, "groups": 32, "m": m}) for m in (16, 17)),
        ("tokens", {"x": 128, "m": 16}), ("tokens", {"x": 128, "m": 17}), ("numbers", {"x": 96, "m": 16}),
        ("numbers", {"x": 128, "m": 17, "arch": 89}),
        ("numbers", {"x": 128, "m": 16, "hip": True, "arch": 0}),
        ("scaled", {"arch": 89}), ("scaled", {"arch": 100, "bias": torch.bfloat16}),
        ("sums", {"arch": 89, "out": torch.float16}), ("sums", {"arch": 89, "bias": torch.float32}),
        ("tokens", {"m": 16, "arch": 89}), ("tokens", {"m": 16, "arch": 80}),
        ("sums", {"arch": 80}), ("fp8_hopper", {"n": 4100}),
        ("sums", {"arch": 89, "n": 4100}), ("sums", {"out": torch.float32}), ("tokens", {"zero": torch.bfloat16}),
        ("tokens", {"element": "e5m2"}), ("sums", {"element": "t" + "0" * 128}), ("tokens", {"scale": torch.uint8}),
        ("fp8_hopper", {"group": 128, "groups": 32}), ("sums", {"group": 128, "groups": 32, "arch": 89}),
        ("fp8_hopper", INT4), ("fp8_hopper", {**INT4, "x": 128, "group": 128, "groups": 32}),
        ("fp8_hopper", {**INT4, "group": 128, "groups": 32}), ("scaled", {**INT4, "arch": 89}),
        ("tokens", {**INT4, "group": 128, "groups": 32, "factor": True}), ("tokens", {**INT4, "m": 1024}),
        ("sums", {**INT4, "group": 128, "groups": 32, "m": 256}),
        ("numbers", {**INT4, "x": 128, "group": 128, "groups": 32, "m": 128}),
        ("tokens", {**INT4, "k": 4160}), ("tokens", {**INT4, "zero": torch.int8}), ("tokens", {"element": "int"}),
        ("sums", {"hip": True, "arch": 0}),
        ("tokens", {"n": 1536, "k": 8960, "packed": (1536, 8960), "group": 8960, "m": 64}),
        ("fp8_hopper", {"n": 1536, "k": 1024, "packed": (1536, 1024), "group": 1024, "m": 64}),
        ("tokens", {"x": 128}), ("numbers", {"x": 64, "group": 64, "groups": 64}),
        ("tokens", {**INT4, "x": 128, "group": 128, "groups": 32, "factor": True}),
        ("numbers", {"x": 128, "group": 128, "groups": 32, "arch": 100}),
    ],
)  # fmt: skip
def test_the_way_depends_on_what_tensor_cores_take(monkeypatch, way, change):
    from qcore_cuda import fp8
    from qcore_cuda.problem import Form
    from qcore_cuda.runtime import hopper
    from qcore_cuda.runtime.device import Device

    monkeypatch.setattr(hopper, "usable", lambda: True)
    fp8.way_of.cache_clear()
    form = Form(**{**FORM, **{name: value for name, value in change.items() if name in Form._fields}})
    device = Device(change.get("arch", 90), change.get("hip", False), 132)
    arguments = change.get("m", 2048), change.get("x", 0), change.get("out", torch.bfloat16), change.get("bias")
    assert fp8.way_of(device, form, *arguments) == way
    fp8.way_of.cache_clear()


BYTES = {
    "wfp8afp8": False, "wfp8afp8-g128": True, "wfp8afp8-g128-token": True, "w4afp8": False, "w4afp8-g128": True,
}  # fmt: skip


def in_squares(weight):
    """A weight with one scale for 128 rows each."""
    first = torch.arange(weight.shape[0]) // 128 * 128
    return qcore.QTensor.from_codes(weight.codes(), weight.scale[:, first].contiguous(), None, weight.format)


@pytest.mark.parametrize(
    ("scheme", "blocks", "square"),
    [*((*item, False) for item in BYTES.items()), ("wfp8afp8-g128", True, True), ("wfp8afp8-g128-token", True, True)],
)
def test_products_of_bytes_get_what_they_need(interpreter, monkeypatch, scheme, blocks, square):
    """Their arguments, checked by what they would compute of them."""
    from qcore_cuda import fp8
    from qcore_cuda.linear import kernel

    def multiply(a, b, by_a, by_b, bias, out_dtype):
        y = (a.view(torch.float8_e4m3fn).double() * by_a) @ (b.view(torch.float8_e4m3fn).double() * by_b).t()
        return (y if bias is None else y + bias.double()).to(out_dtype)

    def scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum):
        assert (a.dtype, b.dtype, a.stride(1), b.stride(0)) == (torch.float8_e4m3fn, torch.float8_e4m3fn, 1, 1)
        assert (scale_a.dtype, scale_b.dtype, use_fast_accum) == (torch.float32, torch.float32, False)
        return multiply(a, b.t(), scale_a.double(), scale_b.double().t(), bias, out_dtype)

    def two_level(codes, scale, weight, bias, out_dtype, squares):
        assert (squares is not None) == square
        if square:
            weight = weight._replace(scale=squares.repeat_interleave(128, 1)[:, : weight.n])
        by_w = weight.scale.double().repeat_interleave(weight.group, 0)[: codes.shape[1]].t()
        by_x = scale.double().repeat_interleave(128, 0)[: codes.shape[1]].t()
        return multiply(codes, weight.data[: weight.n], by_x, by_w, bias, out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(fp8, "two_level", two_level)
    monkeypatch.setattr(fp8, "way_of", lambda *_: fp8.TWO_LEVEL if blocks else fp8.SCALED)
    case = linear_problem(scheme, 20, 144, 256, bias="none" if blocks else "same")
    if square:
        case = replace(case, weight=in_squares(case.weight))
    if scheme == "w4afp8-g128":  # with scales that float16 cannot hold; with others it takes another way
        weight = case.weight
        weight.scale[0, 3] *= 2.0**-30
        case = replace(case, weight=qcore.QTensor.from_codes(weight.codes(), weight.scale, None, weight.format))
    mine = kernel(case.request)
    assert_right(case, mine.run(case.x, mine.pack(case.weight), case.bias))


@pytest.mark.parametrize(
    "scheme",
    [
        "w8afp8", "w4afp8-asym", "w4afp8-g64-asym-token", "w8afp8-g128-token", "wfp8afp8", "w4afp8-g128",
        "w8afp8-g64-asym", "w4afp8-g32",
    ],
)  # fmt: skip
def test_codes_in_float16_are_scaled_by_token(interpreter, monkeypatch, scheme):
    """What the kernels get, checked by what they would compute of it."""
    from qcore_cuda import fp8
    from qcore_cuda.linear import kernel
    from qcore_cuda.problem import float_problem
    from qcore_cuda.products.base import Choice

    class Product:
        def multiply(self, x, weight, bias, device, problem, config, tokens):
            assert (x.dtype, problem.out_dtype) == (torch.float16, torch.bfloat16)
            assert problem.half or problem.one_group
            numbers = dense(weight._replace(factor=None))
            numbers = numbers.half().double() if problem.half else numbers
            y = x[:, : problem.k].double() @ numbers.t() * (1.0 if weight.factor is None else weight.factor.double())
            return (y * tokens.double()[:, None] + bias.double()).to(problem.out_dtype)

    def by_token(device, form, m, group, out_dtype):
        problem = float_problem(form, m, torch.float16, torch.float16)
        return replace(problem, out_dtype=out_dtype), Choice(Product(), None)

    monkeypatch.setattr(fp8, "_by_token", by_token)
    monkeypatch.setattr(fp8, "way_of", lambda *_: fp8.TOKENS)
    case = linear_problem(scheme, 20, 50, 200, bias="same")
    mine = kernel(case.request)
    packed = mine.pack(case.weight)
    assert ("factor" in packed) == ("-g" in scheme)
    assert_right(case, mine.run(case.x, packed, case.bias))


def test_float32_loses_nothing_to_a_rounded_table(interpreter):
    from qcore_cuda.linear import kernel

    for m in (1, 20):
        case = linear_problem("wnf4a16-g32", m, 40, 96, torch.float32)
        mine = kernel(case.request)
        y = mine.run(case.x, mine.pack(case.weight), None)
        assert LINEAR.judge(case, y).worst < 1


def test_tables_in_bfloat16_add_no_error_up():
    """With activations of a mean other than 0, as those of `Draw` have."""
    from qcore_triton.kernels.elements import balanced_bits, bfloat16_value, table_value
    from qcore_triton.packing import element_text

    case = linear_problem("nf4", 64, 64, 8192, torch.bfloat16)
    weight, element = case.weight, element_text(case.weight.format)
    exact = torch.tensor([table_value(element, i) for i in range(16)], dtype=torch.float64)
    table = torch.tensor([bfloat16_value(bits) for bits in balanced_bits(element)], dtype=torch.float64)
    assert (table - exact).abs().sum() > 1e-3
    assert (table - exact).sum().abs() < 2e-4
    assert ((table - exact).abs() <= exact.abs() * 2**-7).all()
    codes, scale = weight.codes().long(), weight.scale.to(torch.bfloat16).double().t().repeat_interleave(64, 1)
    worst = []
    for numbers in (table, exact.to(torch.bfloat16).double()):
        y = case.x.double() @ (numbers[codes] * scale).to(torch.bfloat16).double().t()
        worst.append(float(((y - LINEAR.reference(case)).abs() / LINEAR.allowed(case)).max()))
    assert worst[0] < 0.7 * worst[1], worst
