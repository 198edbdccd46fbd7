"""oneDNN against qcore's contract for int8 weights and int8 activations: on its CPU engine.

Proven: what torch's `_weight_int8pack_mm` and `_int_mm` for XPU ask of oneDNN is what the contract `linear` means by
int8 weights; and zero points of both sides, grouped scales and scales per token, which for XPU are kernels of our own,
agree with oneDNN's independent arithmetic.

Not proven: as in `test_onednn_int4`. The ops for XPU take neither groups nor zero points here.
"""

from __future__ import annotations

import pytest
import torch
import xpu_peers_ops as ops
from xpu_peers_onednn import Matrix
from xpu_peers_problems import DTYPES, for_the_op, made, operands, problems, transposed

from qcore import DynamicInt8
from qcore.contracts import LINEAR
from qcore.weights.activations import dynamic_parameters, quantize_int8


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_weights_per_channel(dtype, record, seed):
    """`_weight_int8pack_mm` on every case of the contract, K of any size."""
    for name, case in problems("w8a16", dtype, seed):
        problem = for_the_op(case)
        y = ops.int8_mm(problem.x, problem.weight.data, problem.weight.scale[0])
        record.judge(f"oneDNN int8pack, {dtype}", name, problem, y, seed)


@pytest.mark.parametrize("scheme", ["w8a16-asym", "w8a16-g32", "w8a16-g32-asym"])
def test_int8_weights_in_groups_and_with_zero_points(scheme, record, seed):
    """float32 x, where groups are whole: the convention is the same for int8 as for int4."""
    for name, case in problems(scheme, torch.float32, seed):
        problem = for_the_op(case)
        weight, (n, k) = problem.weight, problem.weight.shape
        group = weight.format.group(k)
        if k % group == 0 and weight.format.group_size in (None, group):
            weights = Matrix(weight.data, (k, n), (1, k), torch.int8)
            y = ops.matmul(problem.x, weights, ops.grouped(weight.scale, weight.zero, group))
            record.judge("oneDNN s8 with groups or zero points, torch.float32", name, problem, y, seed)


@pytest.mark.parametrize("stored", ["(K, N)", "(N, K)"])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 8, 3), (5, 77, 37), (33, 1024, 129)])
def test_products_of_codes_are_exact(m, k, n, stored):
    """`_int_mm`: whole numbers up to 2**24 come out as they are, in either order of strides."""
    generator = torch.Generator().manual_seed(k)
    x, w = (torch.randint(-128, 128, size, generator=generator).to(torch.int8) for size in ((m, k), (k, n)))
    w = w if stored == "(K, N)" else w.t().contiguous().t()
    assert torch.equal(ops.int_mm(x, w).long(), x.long() @ w.long())


def test_large_sums_of_codes_keep_float32s_digits():
    """Beyond 2**24 the scales of one, which torch always passes, may round a sum to 24 significant bits.

    Without AVX-512 the engine makes x unsigned by adding 128 and rounds the sum before it subtracts what that added.
    """
    x, w = torch.full((3, 8193), 127, dtype=torch.int8), torch.full((8193, 5), 127, dtype=torch.int8)
    w[1::7, 1:] = -3
    exact = x.long() @ w.long()
    largest = (exact + 128 * w.long().sum(0)).abs().max()
    assert (ops.int_mm(x, w).long() - exact).abs().max() <= largest * 2**-24


CODES = ("w4a8", "w4a8-asym", "w4a8-g32", "w4a8-g32-asym", "w4a8-g32-asym-aasym", "w8a8", "w8a8-g64-asym", "w8a8-aasym")


def quantized(problem):
    """Codes, scales and zero points of x per row, by qcore's own rule."""
    activation = problem.request.activation
    assert isinstance(activation, DynamicInt8)
    scale, zero = dynamic_parameters(problem.x.float(), activation.symmetric)
    return quantize_int8(problem.x, scale, zero), scale, zero


def weights_of(weight, **changes):
    """A weight of either width as oneDNN takes it."""
    n, k = weight.shape
    group = weight.format.group(k)
    if weight.format.dtype == "int8":
        parts = {"scale": weight.scale, "zeros": weight.zero, **changes}
        return Matrix(weight.data, (k, n), (1, k), torch.int8), ops.grouped(parts["scale"], parts["zeros"], group)
    plain = operands(weight)
    parts = {"scale": plain.scale, "zeros": plain.zeros, **changes}
    words = Matrix(plain.words, (k, n), (1, plain.words.shape[1] * 8), "u4")
    return words, ops.grouped(parts["scale"], parts["zeros"], group)


@pytest.mark.parametrize("scheme", CODES)
def test_int8_activations_per_token(scheme, record, seed):
    """Codes of x with a scale and a zero point per row, against weights of both widths, where groups are whole."""
    for name, case in problems(scheme, torch.float32, seed, "deep", "rows-256", "m-above-k-wide"):  # a slow reference
        problem = for_the_op(case)
        k, group = problem.request.k, problem.weight.format.group(problem.request.k)
        if k % group == 0 and problem.weight.format.group_size in (None, group):
            y = ops.int8_rows(*quantized(problem), *weights_of(problem.weight))
            record.judge("oneDNN int8 x int8 or u4, per token", name, problem, y, seed)


MISTAKES = {
    "zero point of x of the other sign": lambda w, x: ({}, (x[0], x[1], -x[2])),
    "zero point of x left out": lambda w, x: ({}, (x[0], x[1], None)),
    "zero point of the weight of the other sign": lambda w, x: ({"zeros": 16 - operands(w).zeros}, x),
    "scales of the weight transposed": lambda w, x: ({"scale": transposed(w.scale)}, x),
    "scales of x in another order": lambda w, x: ({}, (x[0], x[1].flip(0).contiguous(), x[2])),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_parameters_shows(mistake, seed):
    """The test of the one above."""
    problem = made("w4a8-g32-asym-aasym", 5, 20, 160, torch.float32, seed)
    rows = quantized(problem)
    changes, wrong = MISTAKES[mistake](problem.weight, rows)
    assert LINEAR.judge(problem, ops.int8_rows(*rows, *weights_of(problem.weight))).ok
    assert not LINEAR.judge(problem, ops.int8_rows(*wrong, *weights_of(problem.weight, **changes))).ok
