from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from op_formulas import (
    OPS,
    _arguments,
    _brute_force,
    _qga4w,
    blockwise,
    cosine,
    expected_matmul,
    per_channel,
    quantize_input,
    signed_nibbles,
)
from torch.nn import functional as F

from qcore.errors import FormatError


@pytest.mark.parametrize("activation", [False, True])
def test_per_channel_with_an_odd_k(activation):
    weight, x = torch.randn(8, 5), torch.randn(3, 5)
    w, scale, _ = per_channel(weight)
    y = OPS.quantized_matmul(x, w, scale, quantize_activation=activation)
    torch.testing.assert_close(y.double(), expected_matmul(x, w, scale, None, -1, activation), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(y, x @ weight.t(), atol=0.1, rtol=0.1)


@pytest.mark.parametrize(("n", "k"), [(4, 2), (8, 5)])
@pytest.mark.parametrize("activation", [False, True])
def test_int4_weights(n, k, activation):
    weight, x = torch.randn(n, k), torch.randn(3, k)
    w, scale, _ = per_channel(weight, 4)
    y = OPS.quantized_matmul(x, w, scale, int4_weight=True, quantize_activation=activation)
    torch.testing.assert_close(y.double(), expected_matmul(x, w, scale, None, -1, activation), atol=1e-4, rtol=1e-4)
    assert cosine(y, x @ weight.t()) > 0.99


@pytest.mark.parametrize("activation", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_blockwise(activation, asymmetric):
    weight, x = torch.randn(8, 6), torch.randn(3, 6)
    w, scale, zero = blockwise(weight, 2, asymmetric=asymmetric)
    assert (w.shape, scale.shape) == ((3, 2, 8), (3, 8))
    y = OPS.quantized_matmul(x, w, scale, zero, 2, False, activation)
    torch.testing.assert_close(y.double(), expected_matmul(x, w, scale, zero, 2, activation), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(y, x @ weight.t(), atol=0.1, rtol=0.1)


@pytest.mark.parametrize(("n_bit", "activation"), list(itertools.product((4, 8), (False, True))))
def test_asymmetric_per_channel(n_bit, activation):
    weight, x = torch.randn(8, 6) + 0.5, torch.randn(3, 6)
    w, scale, zero = per_channel(weight, n_bit, asymmetric=True)
    y = OPS.quantized_matmul(x, w, scale, zero, int4_weight=n_bit == 4, quantize_activation=activation)
    torch.testing.assert_close(y.double(), expected_matmul(x, w, scale, zero, -1, activation), atol=1e-4, rtol=1e-4)
    assert cosine(y, x @ weight.t()) > 0.99


@pytest.mark.parametrize(
    ("size", "k", "n"), [(128, 256, 512), (256, 256, 128), (128, 512, 192), (64, 192, 64), (512, 512, 256)]
)
@pytest.mark.parametrize("n_bit", [4, 8])
def test_larger_shapes(size, k, n, n_bit):
    weight, x = torch.randn(n, k), torch.randn(64, k)
    for asymmetric in (False, True):
        w, scale, zero = blockwise(weight, size, n_bit, asymmetric)
        y = OPS.quantized_matmul(x, w, scale, zero, size, n_bit == 4)
        expected = expected_matmul(x, w, scale, zero, size, False)
        assert float((y - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matmul_has_the_dtype_of_x(dtype):
    w, scale, zero = per_channel(torch.randn(8, 64), asymmetric=True)
    x = torch.randn(2, 3, 64, dtype=dtype)
    for s, z in ((scale, zero), (scale.to(dtype), zero.to(dtype)), (scale.to(dtype), zero)):
        y = OPS.quantized_matmul(x, w, s, z)
        assert (y.dtype, y.shape) == (dtype, (2, 3, 8))
        torch.testing.assert_close(y.double(), expected_matmul(x, w, s, z, -1, False), atol=0.2, rtol=2e-2)


def test_a_row_of_zeros_is_no_division_by_zero():
    w, scale, _ = per_channel(torch.randn(8, 6))
    assert not OPS.quantized_matmul(torch.zeros(2, 6), w, scale, quantize_activation=True).any()
    assert OPS.quantized_matmul(torch.zeros(0, 6), w, scale).shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16i4bf16_rowwise(dtype):
    n, k, group = 12, 64, 32
    codes = torch.randint(-8, 8, (n, k))
    scale, zero = torch.rand(2, n, dtype=dtype) * 0.1, torch.randn(2, n, dtype=dtype)
    dense = torch.empty(n, k, dtype=torch.float64)
    for row, column in itertools.product(range(n), range(k)):
        g = column // group
        dense[row, column] = float(codes[row, column]) * float(scale[g, row]) + float(zero[g, row])
    x = torch.randn(5, k, dtype=dtype)
    weight = signed_nibbles(codes).view(torch.int8)
    y = OPS.bf16i4bf16_rowwise(x, weight, scale, zero)
    assert y.dtype == dtype
    tolerance = 0.3 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(y.double(), x.double() @ dense.t(), atol=tolerance, rtol=2e-2)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_q8csw(bias):
    w, scale = torch.randint(-128, 128, (12, 20)).to(torch.int8), torch.rand(12)
    x, b = torch.randn(2, 3, 20), torch.randn(12) if bias else None
    y = OPS.linear_q8csw(x, w, scale, b)
    expected = x.double() @ (w.double() * scale.double()[:, None]).t() + (0 if b is None else b.double())
    torch.testing.assert_close(y.double(), expected, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("zero", [0, 5, -128])
def test_linear_q8ta_q8csw(sums, zero):
    w, scale = torch.randint(-128, 128, (12, 20)).to(torch.int8), torch.rand(12)
    x, bias = torch.randn(4, 20), torch.randn(12)
    y = OPS.linear_q8ta_q8csw(x, 0.05, zero, w, w.sum(1, dtype=torch.int32) if sums else None, scale, bias)
    codes = quantize_input(x, 0.05, zero)
    expected = torch.empty(4, 12, dtype=torch.float64)
    for m, n in itertools.product(range(4), range(12)):
        total = sum((int(codes[m, k]) - zero) * int(w[n, k]) for k in range(20))
        expected[m, n] = total * 0.05 * float(scale[n]) + float(bias[n])
    torch.testing.assert_close(y.double(), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("static", [False, True])
def test_conv2d(groups, static):
    oc, ic, kh, kw = 6, 4, 3, 2
    kernel = torch.randint(-128, 128, (oc, ic // groups, kh, kw))
    flat = kernel.permute(0, 2, 3, 1).reshape(oc, -1).to(torch.int8)  # columns (KH, KW, IC)
    scale, bias, x = torch.rand(oc), torch.randn(oc), torch.randn(2, ic, 7, 6)
    geometry = ((2, 1), (1, 2), (1, 2), groups)
    tail = (scale, bias, [kh, kw], [2, 1], [1, 2], [1, 2], groups)
    if static:
        y = OPS.conv2d_q8ta_q8csw(x, 0.05, 7, flat, flat.sum(1, dtype=torch.int32), *tail)
        values = (quantize_input(x, 0.05, 7) - 7) * 0.05
    else:
        y, values = OPS.conv2d_q8csw(x, flat, *tail), x.double()
    expected = F.conv2d(values, kernel.double() * scale.double()[:, None, None, None], bias.double(), *geometry)
    torch.testing.assert_close(y.double(), expected, atol=1e-2, rtol=1e-4)


def test_conv2d_takes_one_int_for_both_sides():
    flat, scale, x = torch.randint(-128, 128, (6, 36)).to(torch.int8), torch.rand(6), torch.randn(1, 4, 5, 5)
    one = OPS.conv2d_q8csw(x, flat, scale, None, [3], [1], [1], [1], 1)
    assert torch.equal(one, OPS.conv2d_q8csw(x, flat, scale, None, [3, 3], [1, 1], [1, 1], [1, 1], 1))


@pytest.mark.parametrize("lead", [(3,), (2, 2), (1,), ()])
def test_linear_qta8a_qga4w(lead):
    p = _qga4w(lead)
    y = OPS.linear_qta8a_qga4w(*_arguments(p))
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), _brute_force(p), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("lead", [(3,), (2, 2)])
def test_linear_qta8a_qga4w_qta8o(lead):
    p = _qga4w(lead)
    tokens = torch.Size(lead).numel()
    scale, zero = torch.rand(tokens) + 0.2, torch.randint(-20, 20, (tokens,), dtype=torch.int32)
    y = OPS.linear_qta8a_qga4w_qta8o(*_arguments(p), scale, zero)
    shape = (*lead, 1)
    expected = ((_brute_force(p) / scale.double().view(shape)).round() + zero.view(shape)).clamp(-128, 127)
    assert y.dtype == torch.int8
    assert (y.double() - expected).abs().max() <= 1
    assert (y.double() == expected).float().mean() > 0.9


def test_parameters_per_token_may_have_any_shape():
    p = _qga4w((2, 2))
    expected = OPS.linear_qta8a_qga4w(*_arguments(p))
    p["x_scale"], p["x_zero"] = p["x_scale"].view(2, 2, 1), p["x_zero"].view(2, 2)
    assert torch.equal(OPS.linear_qta8a_qga4w(*_arguments(p)), expected)


@pytest.mark.parametrize("linear_weight", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_q4gsw(linear_weight, transposed, dtype):
    v, d, group = 10, 64, 32
    codes, scales = torch.randint(-8, 8, (v, d)), torch.rand(v, d // group, dtype=dtype)
    weight = signed_nibbles(codes, high_is_even=not linear_weight, offset=8)
    indices = torch.tensor([[0, 9, 3], [3, 3, 1]])
    given = scales.t().contiguous() if transposed else scales
    y = OPS.embedding_q4gsw(weight, given, group, indices, linear_weight)
    dense = codes.float() * scales.float().repeat_interleave(group, 1)
    assert torch.equal(y, dense.to(dtype)[indices])


def test_embedding_with_one_scale_per_row():
    codes, scales = torch.randint(-8, 8, (10, 32)), torch.rand(10)
    y = OPS.embedding_q4gsw(signed_nibbles(codes, True, 8), scales, 32, torch.arange(10))
    assert torch.equal(y, codes * scales[:, None])
    with pytest.raises(IndexError):
        OPS.embedding_q4gsw(signed_nibbles(codes, True, 8), scales, 32, torch.tensor([10]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [-1, 32])
@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("with_zero", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_gradients_go_through_a_matmul(dtype, block, int4, with_zero, quantized):
    generator = torch.Generator().manual_seed(block + 2 * int4 + 4 * with_zero + 8 * quantized)
    n, k = 16, 64
    groups = (n,) if block == -1 else (k // block, n)
    w = torch.randint(-8, 8, (n, k) if block == -1 else (k // block, block, n), generator=generator).to(torch.int8)
    scale = torch.rand(groups, generator=generator)
    zero = torch.rand(groups, generator=generator) if with_zero else None
    dense = w.double() * scale[:, None] - (0 if zero is None else zero[:, None])
    dense = dense if block == -1 else dense.permute(2, 0, 1).reshape(n, k)
    x = torch.randn(3, k, generator=generator).to(dtype).requires_grad_()
    with torch.no_grad():
        expected = torch.ops.qcore.quantized_matmul(x, w, scale, zero, block, int4, quantized)
    y = torch.ops.qcore.quantized_matmul(x, w, scale, zero, block, int4, quantized)
    assert not expected.requires_grad
    torch.testing.assert_close(y.detach(), expected, rtol=0.02, atol=0.02)
    grad = torch.randn(3, n, generator=generator).to(dtype)
    y.backward(grad)
    torch.testing.assert_close(x.grad.double(), grad.double() @ dense, rtol=0.02, atol=0.05)


def test_gradients_go_through_a_convolution_and_to_its_bias():
    x, bias = torch.randn(2, 4, 9, 9, requires_grad=True), torch.zeros(8, requires_grad=True)
    w, scale = torch.randint(-8, 8, (8, 36)).to(torch.int8), torch.rand(8)
    geometry = ([3, 3], [1, 1], [1, 1], [1, 1], 1)
    torch.ops.qcore.conv2d_q8csw(x, w, scale, bias, *geometry).sum().backward()
    dense = (w * scale[:, None]).view(8, 3, 3, 4).permute(0, 3, 1, 2)
    (expected,) = torch.autograd.grad(torch.nn.functional.conv2d(x, dense, padding=1).sum(), x)
    torch.testing.assert_close(x.grad, expected)
    assert torch.equal(bias.grad, torch.full((8,), 162.0))


def test_an_x_that_wants_gradients_is_an_error_inside_a_trace():
    w, scale = torch.ones(8, 64, dtype=torch.int8), torch.ones(8)
    compiled = torch.compile(lambda x: torch.ops.qcore.linear_q8csw(x, w, scale), backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 64)
    torch.testing.assert_close(compiled(x), torch.ops.qcore.linear_q8csw(x, w, scale))
    with pytest.raises(Exception, match="no gradient inside a trace"):
        compiled(x.requires_grad_())
    with torch.no_grad():
        assert compiled(x).shape == (3, 8)


@pytest.mark.parametrize("name", ["quantized_matmul", "linear_q8csw"])
def test_an_x_of_codes_is_named(name):
    with pytest.raises(FormatError, match=rf"{name}: x has dtype torch.int8; it must be floating"):
        getattr(torch.ops.qcore, name)(
            torch.ones(2, 64).to(torch.int8), torch.ones(8, 64).to(torch.int8), torch.ones(8)
        )


def test_parameters_and_onlookers_are_no_trace():
    from torch.utils.flop_counter import FlopCounterMode

    w, scale = torch.ones(8, 64, dtype=torch.int8), torch.nn.Parameter(torch.ones(8))
    x, bias = torch.nn.Parameter(torch.randn(3, 64)), torch.nn.Parameter(torch.ones(8))
    expected = x.detach().sum(-1, keepdim=True).expand(3, 8) + 1
    for onlooker in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        with onlooker:
            y = torch.ops.qcore.linear_q8csw(x, w, scale, bias=bias)
        torch.testing.assert_close(y.detach(), expected)
        found = torch.autograd.grad(y.sum(), [x, bias])
        assert torch.equal(found[0], torch.full((3, 64), 8.0))
        assert torch.equal(found[1], torch.full((8,), 3.0))


def test_scales_have_no_gradient_and_ask_for_none_in_a_trace():
    w, scale = torch.zeros(20, 32, dtype=torch.uint8), torch.ones(20, 2, requires_grad=True)
    indices = torch.tensor([1, 2])
    compiled = torch.compile(
        lambda i, a: torch.ops.qcore.embedding_q4gsw(w, a, 32, i), backend="aot_eager", fullgraph=True
    )
    assert not compiled(indices, scale).requires_grad
    assert not torch.ops.qcore.embedding_q4gsw(w, scale, 32, indices).requires_grad


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
def test_other_derivatives_are_errors():
    w, scale, x = torch.ones(8, 64, dtype=torch.int8), torch.ones(8), torch.randn(3, 64)

    def call(x):
        return torch.ops.qcore.linear_q8csw(x, w, scale)

    with pytest.raises(FormatError, match="no forward-mode derivative"):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))
    with pytest.raises(FormatError, match=r"a transform of torch\.func"):
        torch.func.grad(lambda x: call(x).sum())(x)
    torch.testing.assert_close(torch.func.vmap(call)(x), call(x))
