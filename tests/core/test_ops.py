"""Each op against a formula written out here, on plain tensors."""

from __future__ import annotations

import gc
import inspect
import itertools
import weakref

import pytest
import torch
from torch.nn import functional as F

import qcore
from qcore import ops
from qcore.errors import FormatError

OPS = torch.ops.qcore


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def cosine(a, b):
    return float(torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


# xla::quantized_matmul: torch_xla's own cases


def per_channel(w, n_bit=8, asymmetric=False):
    """torch_xla's quantizer: absmax / (2^(n-1) - 1), or the range over 2^n - 1 with zero point times scale."""
    top = 2 ** (n_bit - 1) - 1
    if not asymmetric:
        scale = w.abs().amax(1) / top
        return (w / scale[:, None]).round().clamp(-top - 1, top).to(torch.int8), scale, None
    low, high = w.amin(1), w.amax(1)
    scale = (high - low) / (2**n_bit - 1)
    zero = (-top - 1 - low / scale).round()
    codes = ((w / scale[:, None]).round() + zero[:, None]).clamp(-top - 1, top)
    return codes.to(torch.int8), scale, zero * scale


def blockwise(w, size, n_bit=8, asymmetric=False):
    """Codes (K/bs, bs, N), scale and zero point (K/bs, N)."""
    n, k = w.shape
    codes, scale, zero = per_channel(w.reshape(n * (k // size), size), n_bit, asymmetric)
    shape = (n, k // size)
    zero = None if zero is None else zero.view(shape).t().contiguous()
    return codes.view(*shape, size).permute(1, 2, 0).contiguous(), scale.view(shape).t().contiguous(), zero


def quantized_per_token(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127) * scale


def expected_matmul(x, w, scale, zero, size, activation):
    """x @ (w * scale - zero)^T in float64."""
    x, scale = x.double(), scale.double()
    x = quantized_per_token(x) if activation else x
    if size == -1:
        dense = w.double() * scale[:, None]
        return x @ (dense if zero is None else dense - zero.double()[:, None]).t()
    dense = w.double() * scale[:, None]
    dense = dense if zero is None else dense - zero.double()[:, None]
    return x @ dense.reshape(-1, w.shape[-1])


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


# torchao's bf16i4bf16_rowwise


def signed_nibbles(codes, high_is_even=False, offset=0):
    """int codes (N, K) to bytes (N, K/2)."""
    even, odd = (codes[:, 0::2] + offset) & 15, (codes[:, 1::2] + offset) & 15
    return ((even << 4 | odd) if high_is_even else (odd << 4 | even)).to(torch.uint8)


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


# ExecuTorch Vulkan


def quantize_input(x, scale, zero):
    return ((x.double() / scale).round() + zero).clamp(-128, 127)


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


def _qga4w(lead=(3,), n=5, k=16, group=8):
    codes, zeros = torch.randint(-8, 8, (n, k)), torch.randint(-8, 8, (k // group, n))
    tokens = torch.Size(lead).numel()
    return {
        "x": torch.randint(-128, 128, (*lead, k)).to(torch.int8),
        "x_scale": torch.rand(tokens) * 0.1,
        "x_zero": torch.randint(-20, 20, (tokens,), dtype=torch.int32),
        "codes": codes,
        "weights": signed_nibbles(codes, high_is_even=True, offset=8),
        "group": group,
        "scales": torch.rand(k // group, n) * 0.1,
        "zeros": zeros.to(torch.int8),
    }


def _brute_force(p):
    """real = scale * (quantized - zero) for both operands, one product at a time."""
    x = p["x"].reshape(-1, p["x"].shape[-1])
    y = torch.zeros(x.shape[0], p["codes"].shape[0], dtype=torch.float64)
    for m, n, k in itertools.product(range(y.shape[0]), range(y.shape[1]), range(x.shape[1])):
        g = k // p["group"]
        weight = float(p["scales"][g, n]) * (int(p["codes"][n, k]) - int(p["zeros"][g, n]))
        y[m, n] += float(p["x_scale"][m]) * (int(x[m, k]) - int(p["x_zero"][m])) * weight
    return y.reshape(*p["x"].shape[:-1], -1)


def _arguments(p):
    return (p["x"], p["x_scale"], p["x_zero"], p["weights"], p["group"], p["scales"], p["zeros"])


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


# Torch's own checks, fakes, compilers


def samples():
    w, scale, zero = per_channel(torch.randn(8, 6), asymmetric=True)
    bw, bscale, bzero = blockwise(torch.randn(8, 6), 2, asymmetric=True)
    x, conv = torch.randn(3, 6), torch.randint(-128, 128, (6, 36)).to(torch.int8)
    image, tail = torch.randn(1, 4, 5, 5), (None, [3, 3], [1, 1], [0, 0], [1, 1], 1)
    p = _qga4w()
    table = torch.randint(0, 256, (10, 16), dtype=torch.uint8)
    yield "quantized_matmul", (x, w, scale, zero)
    yield "quantized_matmul", (x, bw, bscale, bzero, 2, False, True)
    yield (
        "bf16i4bf16_rowwise",
        (torch.randn(2, 8), torch.zeros(4, 4, dtype=torch.int8), torch.rand(2, 4), torch.rand(2, 4)),
    )
    yield "linear_q8csw", (x, w, scale, torch.randn(8))
    yield "linear_q8ta_q8csw", (x, 0.1, 3, w, None, scale)
    yield "conv2d_q8csw", (image, conv, torch.rand(6), *tail)
    yield "conv2d_q8csw", (image.to(memory_format=torch.channels_last), conv, torch.rand(6), *tail)
    yield "conv2d_q8ta_q8csw", (image, 0.1, 3, conv, None, torch.rand(6), *tail)
    yield "linear_qta8a_qga4w", _arguments(p)
    yield "linear_qta8a_qga4w_qta8o", (*_arguments(p), torch.rand(3) + 1, torch.zeros(3, dtype=torch.int32))
    yield "embedding_q4gsw", (table, torch.rand(10, 1), 32, torch.arange(3))


@pytest.mark.parametrize("index", range(11))
def test_opcheck_and_fakes(index):
    name, arguments = list(samples())[index]
    op = getattr(OPS, name).default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    y = op(*arguments)
    meta = op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
    assert (meta.shape, meta.dtype, meta.device.type) == (y.shape, y.dtype, "meta")


def test_every_op_has_a_sample_and_an_implementation_that_is_documented():
    names = {name for name, _ in samples()}
    defined = {
        line.split("(")[0].split("::")[1]
        for line in torch._C._dispatch_get_all_op_names()
        if line.startswith("qcore::")
    }
    assert names == defined
    assert all(inspect.getdoc(getattr(ops, name)) for name in names)


def test_compile_packs_once_and_keeps_one_graph():
    torch._dynamo.reset()
    w, scale, _ = per_channel(torch.randn(8, 64))
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    compiled = torch.compile(
        lambda x: OPS.quantized_matmul(x, w, scale) * 2, fullgraph=True, dynamic=True, backend=backend
    )
    before = len(ops._cache)
    for rows in (2, 3, 7):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(compiled(x), OPS.quantized_matmul(x, w, scale) * 2)
    assert len(graphs) == 1
    assert len(ops._cache) == before + 1


# The cache of packed weights


def test_a_weight_is_packed_once_and_freed_with_it(add_kernel):
    made = add_kernel("mine")
    w, scale, _ = per_channel(torch.randn(8, 64))
    x = torch.randn(2, 64)
    OPS.quantized_matmul(x, w, scale)
    packs = sum(kernel.packs for kernel in made.values())
    for _ in range(3):
        OPS.quantized_matmul(x, w, scale)
    assert sum(kernel.packs for kernel in made.values()) == packs
    (entry,) = [
        e for entries in ops._cache._entries.values() for e in entries.values() if e.made_from((w, scale, None))
    ]
    freed = weakref.ref(entry)
    del entry, w
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("index", range(11))
def test_no_op_keeps_its_weight_alive(index):
    gc.collect()
    before = len(ops._cache)
    name, arguments = list(samples())[index]
    getattr(OPS, name)(*arguments)
    assert len(ops._cache) == before + 1
    del arguments
    gc.collect()
    assert len(ops._cache) == before


def test_a_weight_that_is_changed_in_place_is_packed_anew():
    w, scale, _ = per_channel(torch.randn(8, 64))
    x = torch.randn(2, 64)
    for change in (lambda: w.mul_(-1), lambda: scale.mul_(2), w[0].zero_):
        change()
        y = OPS.quantized_matmul(x, w, scale)
        torch.testing.assert_close(y.double(), expected_matmul(x, w, scale, None, -1, False), atol=1e-3, rtol=1e-3)


def test_scales_made_for_each_call_are_not_mistaken_for_one_another():
    # A tensor that is gone leaves its id to the next one.
    w, scale, _ = per_channel(torch.randn(8, 64))
    x = torch.randn(2, 64)
    for factor in (1.0, 2.0, 3.0, 4.0, 5.0):
        y = OPS.quantized_matmul(x, w, scale * factor)
        torch.testing.assert_close(
            y.double(), expected_matmul(x, w, scale * factor, None, -1, False), atol=1e-3, rtol=1e-3
        )
    assert sum(len(entries) for key, entries in ops._cache._entries.items() if key is w) <= 2


def test_one_weight_read_in_two_ways():
    w = torch.randint(-8, 8, (8, 64)).to(torch.int8)
    scale, x = torch.rand(8), torch.randn(2, 64)
    first = OPS.quantized_matmul(x, w, scale, int4_weight=True)
    torch.testing.assert_close(first, OPS.linear_q8csw(x, w, scale), atol=1e-4, rtol=1e-4)


def test_inference_tensors_work():
    with torch.inference_mode():
        w, scale, _ = per_channel(torch.randn(8, 64))
        x = torch.randn(2, 64)
        y = OPS.quantized_matmul(x, w, scale)
    torch.testing.assert_close(y.double(), expected_matmul(x, w, scale, None, -1, False), atol=1e-3, rtol=1e-3)


def test_settings_are_obeyed_by_weights_that_are_packed_already(add_kernel):
    made = add_kernel("mine", qcore.EMULATED)
    w, scale, _ = per_channel(torch.randn(8, 64))
    x = torch.randn(2, 64)
    OPS.quantized_matmul(x, w, scale)
    with qcore.using("mine"):
        OPS.quantized_matmul(x, w, scale)
    assert any(kernel.packs and kernel.inner.n == 8 for kernel in made.values())
    with qcore.using(strict=True), pytest.raises(qcore.UnsupportedError):
        OPS.quantized_matmul(x, w, scale)


# Errors


X, W, S = torch.zeros(3, 6), torch.zeros(8, 6, dtype=torch.int8), torch.ones(8)
B = torch.zeros(4, 3, dtype=torch.uint8)
Q = torch.zeros(3, 6, dtype=torch.int8)
T = torch.ones(3)
TAIL = ([3, 3], [1, 1], [0, 0], [1, 1], 1)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("quantized_matmul", (X, W.float(), S), "w has dtype torch.float32; int4 values ride in int8 too"),
        ("quantized_matmul", (X, W[0], S), r"per-channel w has shape \(6,\); it must be \(N, K\)"),
        ("quantized_matmul", (X, W, S[:5]), r"scale has shape \(5,\); it must be \(8,\)"),
        ("quantized_matmul", (X, W, S, S[:5]), r"zero_point has shape \(5,\)"),
        ("quantized_matmul", (X[:, :5], W, S), r"x has shape \(3, 5\); its last dimension must be 6"),
        ("quantized_matmul", (X, W, S, None, 2), r"blockwise w has shape \(8, 6\); it must be \(K/2, 2, N\)"),
        ("quantized_matmul", (X, W + 9, S, None, -1, True), r"int4_weight is set, but w spans 9\.\.9"),
        ("bf16i4bf16_rowwise", (X, W, S, S), r"both \(K/g, N\)"),
        ("bf16i4bf16_rowwise", (X, W.float(), S[None], S[None]), r"it must be int8 \(N, K/2\)"),
        ("bf16i4bf16_rowwise", (X, B.view(torch.int8), torch.ones(4, 4), torch.ones(4, 4)), "do not divide K = 6"),
        ("linear_q8csw", (X, W.float(), S), r"they must be int8 \(N, K\)"),
        ("linear_q8csw", (X, W, S[:5]), "weight_scales have shape"),
        ("linear_q8ta_q8csw", (X, 0.1, 0, W, S, S), "weight_sums have dtype torch.float32"),
        ("linear_q8ta_q8csw", (X, 0.0, 0, W, None, S), "scale is 0.0; it must be positive"),
        ("linear_q8ta_q8csw", (X, 0.1, 200, W, None, S), "zero_point is 200"),
        ("conv2d_q8csw", (X, W, S, None, *TAIL), r"it must be \(B, IC, H, W\)"),
        ("conv2d_q8csw", (torch.zeros(1, 4, 5, 5), W, S, None, *TAIL), r"weights have 6 columns; they need .* = 36"),
        ("conv2d_q8csw", (torch.zeros(1, 4, 5, 5), W, S, None, [3, 3, 3], *TAIL[1:]), "take one or two ints"),
        ("linear_qta8a_qga4w", (X, T, T, B, 2, torch.ones(3, 4), torch.ones(3, 4)), "it must hold int8 codes"),
        ("linear_qta8a_qga4w", (Q, T, T, B, 4, torch.ones(3, 4), torch.ones(3, 4)), "group_size 4 must divide K = 6"),
        (
            "linear_qta8a_qga4w",
            (Q, T, T, B, 2, torch.ones(4, 3), torch.ones(3, 4)),
            r"weight_scales have shape \(4, 3\)",
        ),
        (
            "linear_qta8a_qga4w",
            (Q, T, T, B, 2, torch.ones(3, 4), torch.ones(3, 4)),
            "weight_zeros have dtype torch.float32",
        ),
        (
            "linear_qta8a_qga4w",
            (Q, T[:2], T, B, 2, torch.ones(3, 4), torch.ones(3, 4).int()),
            "has 2 values; x has 3 tokens",
        ),
        ("embedding_q4gsw", (W, S, 2, torch.arange(3)), r"it must be uint8 \(V, D/2\)"),
        ("embedding_q4gsw", (B, S, 4, torch.arange(3)), "group_size 4 must divide D = 6"),
        ("embedding_q4gsw", (B, S, 2, torch.arange(3)), r"they must be \(V, D/g\) = \(4, 3\)"),
    ],
)
def test_errors_name_the_op_and_what_is_wrong(name, arguments, words):
    with pytest.raises(FormatError, match=words) as caught:
        getattr(OPS, name)(*arguments)
    assert f"qcore::{name}" in str(caught.value) or "StaticInt8" in str(caught.value)
