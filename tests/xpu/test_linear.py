"""Products through torch's XPU ops, whose stand-ins round as coarsely as the device may, against the contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from linear_problems import linear_problem
from xpu_problems import NARROW, assert_right, kernel_for, random_weight, result

import qcore
from qcore import FormatError, QTensor
from qcore.contracts import LINEAR
from qcore.resolving.verification import difference
from qcore_xpu import linear, products

pytestmark = pytest.mark.usefixtures("stand_in", "interpreter")

INT4 = [
    "w4a16", "w4a16-asym", "w4a16-fzp", "w4a16-g128", "w4a16-g32-asym", "w4a16-g64-fzp", "w4a16-g20", "w4a16-g20-fzp",
    "w4a16-g8-asym", "w4a16-g256",
]  # fmt: skip
INT8 = ["w8a8", "w8a8-asym", "w8a8-fzp", "w8a8-aasym", "w8a8-asym-aasym", "w8a8-fzp-aasym", "w8a8-static"]
FLOAT = [*INT4, "w8a16"]


@pytest.mark.parametrize("bias", ["none", "same", "float32"])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("scheme", FLOAT)
def test_float_activations(scheme, dtype, bias):
    for seed, (m, n, k) in enumerate(((1, 16, 64), (5, 20, 77), (3, 3, 5), (17, 33, 300), (2, 1, 1024))):
        problem = linear_problem(scheme, m, n, k, dtype, bias=bias, seed=seed)
        kernel = kernel_for(problem)
        packed = kernel.pack(problem.weight)
        assert not difference(kernel.unpack(packed), problem.weight)
        assert_right(problem, kernel(problem.x, packed, problem.bias))


@pytest.mark.parametrize("kind", [{"weights": w} for w in ("codes", "zeros", "tiny", "narrow")] + [{"inputs": "large"}])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("scheme", FLOAT)
def test_extreme_weights_and_activations(scheme, dtype, kind):
    assert_right(linear_problem(scheme, 4, 20, 160, dtype, **kind))
    assert_right(linear_problem(scheme, 4, 20, 160, dtype, bias="same", **kind))


@pytest.mark.parametrize("bias", ["none", "same", "float32"])
@pytest.mark.parametrize("scheme", [*INT8, "w8a8-o8", "w8a8-static-o8", "w8a8-asym-aasym-o8"])
def test_int8_activations(by_torch, scheme, bias):
    for dtype in (torch.float32, *NARROW):
        for seed, (m, n, k) in enumerate(((1, 16, 64), (5, 20, 77), (3, 3, 5), (40, 33, 300))):
            problem = linear_problem(scheme, m, n, k, dtype, bias=bias, seed=seed)
            kernel = kernel_for(problem)
            packed = kernel.pack(problem.weight)
            assert not difference(kernel.unpack(packed), problem.weight)
            assert_right(problem, kernel(problem.x, packed, problem.bias, **problem.given))


@pytest.mark.parametrize("scheme", ["w8a8-asym-token", "w8a8-token-o8t", "w8a8-fzp-token-o8t", "w8a8-o8t"])
def test_parameters_that_come_with_each_call(by_torch, scheme):
    problem = linear_problem(scheme, 6, 20, 77, bias="same")
    assert_right(problem)


def test_codes_come_from_triton_where_it_is():
    assert_right(linear_problem("w8a8-asym-aasym", 3, 16, 64))


def test_the_same_weights_with_float32_results(by_torch):
    problem = linear_problem("w8a8-asym", 5, 16, 64)
    assert_right(replace(problem, request=replace(problem.request, out_dtype=torch.float32)))


# What rounding twice, or too coarsely, would get wrong.


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-g32", "w4a16-g128-asym", "w4a16-g32-fzp", "w8a16"])
def test_a_bias_that_cancels_the_product(scheme, rows, dtype):
    problem = linear_problem(scheme, 1, 64, 512, dtype, bias="same")
    problem = replace(problem, x=problem.x.abs().repeat(rows, 1))
    old = problem.weight
    # Scales of x's dtype: the rounding of others is in the product itself.
    zero = None if old.zero is None else old.zero.to(dtype) if old.zero.is_floating_point() else old.integer_zero()
    problem = replace(problem, weight=QTensor.from_codes(old.codes(), old.scale.to(dtype), zero, old.format))
    product = LINEAR.reference(replace(problem, bias=torch.zeros(64)))
    problem = replace(problem, bias=(-product[0]).to(dtype))
    assert_right(problem)
    assert_right(replace(problem, bias=-product[0].float()))


@pytest.mark.parametrize("size", [1.0, 1e-2, 3e4])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-asym", "w8a16"])
def test_float32_scales_per_channel_are_applied_in_float32(scheme, dtype, size):
    problem = linear_problem(scheme, 4, 64, 512, dtype, bias="same")
    old, x = problem.weight, (problem.x.abs() / size**0.5).to(dtype)
    weight = QTensor.from_codes(old.codes(), old.scale.float() * size, old.integer_zero(), old.format)
    problem = replace(problem, weight=weight, x=x[:1].repeat(4, 1))
    product = LINEAR.reference(replace(problem, bias=torch.zeros(64)))[0]
    assert_right(replace(problem, bias=-product.to(dtype)))
    assert_right(replace(problem, bias=-product.float()))


@pytest.mark.parametrize("size", [1e-4, 1e5])
def test_int8_weights_that_float16_does_not_hold(size):
    problem = linear_problem("w8a16", 40, 33, 300, torch.float16, bias="same")
    old = problem.weight
    weight = QTensor.from_codes(old.codes(), old.scale.float() * size, None, old.format)
    problem = replace(problem, weight=weight, x=(problem.x.float() / size).half())
    assert_right(problem)
    assert_right(replace(problem, bias=-LINEAR.reference(replace(problem, bias=torch.zeros(33)))[0].float()))


@pytest.mark.parametrize("dtype", NARROW)
def test_int8_weights_for_many_rows_are_dequantized_in_parts(monkeypatch, dtype):
    monkeypatch.setattr(products, "_CHUNK", 1000)
    for bias in ("same", "float32"):
        assert_right(linear_problem("w8a16", 40, 33, 300, dtype, bias=bias))


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-g32-asym", "w4a16-fzp"])
def test_a_bias_that_is_inf_or_nan_stays_in_its_column(scheme):
    for dtype, of_bias in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        problem = linear_problem(scheme, 2, 16, 64, dtype, bias="same")
        bias = problem.bias.to(of_bias)
        bias[3], bias[5], bias[7] = -torch.inf, torch.inf, torch.nan
        y = result(replace(problem, bias=bias))
        assert torch.equal(y[:, [3, 5]], torch.tensor([[-torch.inf, torch.inf]] * 2, dtype=dtype))
        assert y[:, 7].isnan().all()
        assert y[:, [0, 1, 2, 4, 6, *range(8, 16)]].isfinite().all()


def test_a_kernel_for_a_layer_with_a_bias_also_takes_none():
    for scheme in ("w4a16-g32-asym", "w4a16", "w8a16"):
        with_bias = linear_problem(scheme, 3, 16, 64, bias="same")
        without = replace(with_bias, bias=None)
        for problem in (without, replace(with_bias, request=replace(with_bias.request, bias=False))):
            assert_right(problem)


@pytest.mark.parametrize("size", [1e-7, 1e-3, 300.0])
@pytest.mark.parametrize("form", ["int4-g32-asym", "int4", "int4-fzp", "int4-g20-fzp"])
def test_float16_with_scales_and_rows_of_any_size(form, size):
    """Neither products nor what the op rounds in between overflows where the result does not, or vanishes."""
    weight = random_weight(16, 160, form)
    zero = weight.zero if weight.format.zero is not qcore.ZeroPoint.FLOAT else weight.zero * size
    scale = weight.scale * size
    scale[:, ::2] *= 1e-3  # columns of different sizes
    zero = weight.integer_zero() if weight.format.zero is qcore.ZeroPoint.INT else zero
    weight = QTensor.from_codes(weight.codes(), scale, zero, weight.format)
    problem = linear_problem(f"w4a16{form.removeprefix('int4')}", 5, 16, 160, torch.float16, bias="same")
    x = problem.x * torch.tensor([1e-3, 1.0, 30.0, 0.0, 50.0], dtype=torch.float16).view(5, 1)
    problem = replace(problem, weight=weight, x=x, bias=problem.bias * size)
    assert_right(problem)


def test_rows_with_inf_or_nan_leave_the_others_alone():
    weight = random_weight(16, 64, "int4-g32-asym")
    tiny = QTensor.from_codes(weight.codes(), weight.scale * 1e-5, weight.integer_zero(), weight.format)
    problem = linear_problem("w4a16-g32-asym", 4, 16, 64, torch.float16)
    for w in (weight, tiny):  # with and without levels
        case = replace(problem, weight=w)
        case.x[1, 3], case.x[2, 5] = torch.inf, torch.nan
        y = result(case)
        assert y[[0, 3]].isfinite().all()
        assert not y[1].isfinite().any()
        assert y[2].isnan().all()


def test_a_row_that_holds_nan_is_nan_with_int8_activations(by_torch):
    problem = linear_problem("w8a8-asym-aasym", 3, 16, 64)
    problem.x[1, 5] = torch.nan
    y = result(problem)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


# Sums in int32.


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-asym-aasym", "w8a8-fzp-aasym"])
def test_a_long_k_is_added_in_parts(by_torch, monkeypatch, scheme):
    monkeypatch.setattr(products, "EXACT_K", 64)
    problem = linear_problem(scheme, 3, 16, 300, bias="same")
    packed = kernel_for(problem).pack(problem.weight)
    assert packed["sums"].shape == (5, 16)
    assert_right(problem)


def test_the_largest_sums_fit_int32(by_torch, stand_in):
    k = products.EXACT_K
    assert 255 * 255 * k < 2**31
    codes = torch.full((2, k + 3), -128, dtype=torch.int8)
    codes[1] = 127
    zero = torch.tensor([[127, -128]], dtype=torch.int8)
    weight = QTensor.from_codes(codes, torch.full((1, 2), 0.5), zero, qcore.Format.parse("int8-asym"))
    problem = linear_problem("w8a8-asym-token", 2, 2, k + 3)
    x = torch.full((2, k + 3), -128, dtype=torch.int8)
    given = {"x_scale": torch.tensor([1.0, 1.0]), "x_zero_point": torch.tensor([127, -128], dtype=torch.int32)}
    problem = replace(problem, x=x, weight=weight, given=given)
    y = result(replace(problem, request=replace(problem.request, out_dtype=torch.float32)))
    assert torch.equal(y, torch.tensor([[255.0 * 255, -255.0 * 255], [0, 0]]) * (k + 3) * 0.5)
    assert [call.shapes["codes"][0] for call in stand_in.calls()] == [k, 128]


# Shapes, ops, mistakes.


@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w8a16", "w8a8"])
def test_shapes_of_x(by_torch, scheme):
    problem = linear_problem(scheme, 6, 20, 77)
    kernel, packed = kernel_for(problem), kernel_for(problem).pack(problem.weight)
    y = kernel(problem.x, packed, None)
    assert torch.equal(kernel(problem.x.view(2, 1, 3, 77), packed, None), y.view(2, 1, 3, 20))
    assert torch.equal(kernel(problem.x[4], packed, None), y[4])
    assert torch.equal(kernel(problem.x.t().contiguous().t(), packed, None), y)
    assert torch.equal(kernel(torch.stack((problem.x, problem.x), -1)[..., 0], packed, None), y)
    assert kernel(problem.x[:0], packed, None).shape == (0, 20)
    with pytest.raises(FormatError, match="its last dimension must be K=77"):
        kernel(problem.x[:, :76], packed, None)


@pytest.mark.parametrize("scheme", ["w4a16-g32-fzp", "w4a16", "w8a16", "w8a8-asym-aasym", "w8a8-static"])
def test_ops_in_a_graph_give_the_same_bits(by_torch, scheme):
    problem = linear_problem(scheme, 5, 16, 77, bias="same")
    kernel = kernel_for(problem)
    packed = kernel.pack(problem.weight)
    torch._dynamo.reset()
    graph = torch.compile(lambda x: kernel(x, packed, problem.bias), fullgraph=True, dynamic=True, backend="eager")
    for x in (problem.x, problem.x[:2], problem.x[:0]):
        assert torch.equal(graph(x), kernel(x, packed, problem.bias))


@pytest.mark.parametrize("scheme", ["w4a16-g32-fzp", "w8a16", "w8a8-asym"])
def test_autocast_does_not_narrow_what_happens_in_float32(by_torch, scheme):
    problem = linear_problem(scheme, 5, 16, 77, torch.float16, bias="float32")
    expected = result(problem)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(result(problem), expected)


def test_another_weight_is_refused():
    kernel = kernel_for(linear_problem("w4a16-g32", 1, 16, 64))
    for weight in (random_weight(16, 96, "int4-g32"), random_weight(16, 64, "int4-g32-asym")):
        with pytest.raises(FormatError, match=r"xpu.w4a16 was made for int4-g32/plain of shape \(16, 64\)"):
            kernel.pack(weight)


# Which requests there is an op for.


def request(scheme, dtype=torch.bfloat16, k=128, **changes):
    plain = LINEAR.request_for(qcore.Scheme.parse(scheme), torch.device("cpu"), dtype, 16, k)
    return replace(plain, **changes)


@pytest.mark.parametrize(
    "asked",
    [
        request("w4a16-g32", torch.float32),
        request("w8a16", torch.float32),
        request("w4a16-g32", out_dtype=torch.float32),
        request("w8a16", torch.float16, out_dtype=torch.bfloat16),
        request("w8a16-asym"),
        request("w8a16-g32"),
        request("w8a8-g64"),
        request("w4a8"),
        request("w4a8-g32-asym"),
    ],
)
def test_what_is_left_to_triton(asked):
    assert not linear.has_op(asked)
    assert linear.why_not(asked) == "torch has no op for XPU that computes this product."


def test_groups_that_padding_makes_larger_than_a_dense_weight():
    reason = linear.why_not(request("w4a16-g7-asym"))
    assert "groups of 7 make the weight 4.57 times as large. Use groups of 32, 64 or 128." in reason
    assert linear.kernel(request("w4a16-g8-asym")).name == "xpu.w4a16"
    assert linear.kernel(request("w4a16-g7", k=7)).name == "xpu.w4a16"


def test_groups_as_long_as_k_are_one():
    assert linear.kernel(request("w8a16-g256")).name == "xpu.w8a16"
    assert linear.kernel(request("w8a8-g128")).name == "xpu.w8a8"


def test_an_op_that_this_torch_lacks(monkeypatch):
    monkeypatch.setattr(linear.aten, "missing", lambda name: f"torch lacks {name}.")
    assert linear.why_not(request("w8a16")) == "torch lacks _weight_int8pack_mm."
    assert not linear.has_op(request("w8a16-asym"))


def test_weights_packed_alike_are_told_apart_from_others():
    packings = {
        linear.kernel(asked).packing
        for asked in (
            request("w4a16-g32"), request("w4a16-g32", torch.float16), request("w4a16-g32", bias=True),
            request("w8a16"), request("w8a8"),
        )
    }  # fmt: skip
    assert len(packings) == 5


@pytest.mark.parametrize(
    ("scheme", "k", "bias", "text"),
    [
        ("w4a16-g128", 4096, False, ""),
        ("w4a16-g20", 4000, False, "; groups of 20 padded to 32 columns: 60% more weight to read"),
        ("w4a16", 77, False, "; K padded to 96: 25% more weight to read"),
        ("w4a16-g128", 4000, False, "; K padded to 4096: 2% more weight to read"),
        ("w4a16-g128", 4096, True, "; 128 columns for the bias: 3% more weight to read"),
        ("w4a16-g32", 4096, True, "; 32 columns for the bias: under 1% more weight to read"),
        ("w4a16-g128", 4000, True, "; K padded to 4096, 128 columns for the bias: 6% more weight to read"),
    ],
)
def test_notes_say_what_padding_costs(scheme, k, bias, text):
    assert linear.kernel(request(scheme, k=k, bias=bias)).note == f"oneDNN's int4 product{text}"


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a16", "w8a8", "w4a8-g32", "w8a16-g32"])
def test_a_bias_of_another_shape_is_an_error(interpreter, stand_in, scheme):
    with qcore.using("xpu_stand_in", strict=True):
        layer = qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(64, 32, dtype=torch.bfloat16), scheme)
        kernel, packed = layer.decision.kernel, layer._primary.packed
    for bias in (torch.zeros(5), torch.zeros(1), torch.tensor(0.0), torch.zeros(1, 32)):
        with pytest.raises(qcore.FormatError, match=r"bias has shape .*; this weight needs \(32,\)"):
            kernel(torch.randn(2, 64, dtype=torch.bfloat16), packed, bias)
