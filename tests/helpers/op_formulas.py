"""What the tests in test_ops, test_ops_cache share."""

from __future__ import annotations

import itertools

import pytest
import torch

OPS = torch.ops.qcore


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def cosine(a, b):
    return float(torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


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


def signed_nibbles(codes, high_is_even=False, offset=0):
    """int codes (N, K) to bytes (N, K/2)."""
    even, odd = (codes[:, 0::2] + offset) & 15, (codes[:, 1::2] + offset) & 15
    return ((even << 4 | odd) if high_is_even else (odd << 4 | even)).to(torch.uint8)


def quantize_input(x, scale, zero):
    return ((x.double() / scale).round() + zero).clamp(-128, 127)


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


X, W, S = torch.zeros(3, 6), torch.zeros(8, 6, dtype=torch.int8), torch.ones(8)


B = torch.zeros(4, 3, dtype=torch.uint8)


Q = torch.zeros(3, 6, dtype=torch.int8)


T = torch.ones(3)


TAIL = ([3, 3], [1, 1], [0, 0], [1, 1], 1)
