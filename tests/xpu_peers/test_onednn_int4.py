"""oneDNN, which computes torch's int4 op for XPU, against qcore's contract: on its CPU engine.

Proven: handed the neutral bytes of `PLAIN_INT32` as torch hands them over, oneDNN reads what the contract `linear`
means: the order of nibbles, the place and sign of zero points (int8, for codes 0..15), scales (G, N) in x's dtype,
groups. It is the library that runs on the device, with the same interface, whose conventions these are.

Not proven: its GPU kernels, which are others; their speed; the glue in torch between op and library, of which
`xpu_peers_ops` repeats what the sources say; float16 arithmetic, where this engine computes in float32.
"""

from __future__ import annotations

import pytest
import torch
import xpu_peers_onednn as onednn
import xpu_peers_ops as ops
from xpu_peers_onednn import Matrix
from xpu_peers_problems import DTYPES, INT4, MISTAKES, every_code, for_the_op, made, operands, problems, transposed

from qcore.contracts import LINEAR

# A half has no such scales; `test_plugin` shows what the plugin does about it.
BEYOND_HALF = {torch.float16: ("tiny-scales",)}


def test_the_library_is_the_one_for_sycl():
    """The interface is that of oneDNN 3; its engines are those for SYCL, as the one in torch's XPU build is."""
    version = onednn.version()
    assert (version.major, version.cpu_runtime, version.gpu_runtime) == (3, onednn.SYCL, onednn.SYCL)


def whole(problem):
    """Whether the op takes the weight as it is: groups of a multiple of 32, and none that is ragged."""
    k, group = problem.request.k, problem.weight.format.group(problem.request.k)
    return problem.weight.format.group_size in (None, group) and (group % 32, k % group) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", INT4)
def test_neutral_bytes_give_the_numbers_of_the_contract(scheme, dtype, record, seed):
    """Every case of the contract whose groups the op takes as they are, with fresh random numbers and no bias.

    Scales are rounded to x's dtype, as the op wants them: that costs part of the contract's tolerance, not all. float32
    goes beyond the op, and shows the conventions to seven digits.
    """
    served = 0
    for name, case in problems(scheme, dtype, seed, *BEYOND_HALF.get(dtype, ())):
        problem = for_the_op(case)
        if whole(problem):
            y = operands(problem.weight, dtype).given_to(ops.int4_mm, problem.x)
            record.judge(f"oneDNN u4, {dtype}, neutral bytes", name, problem, y, seed)
            served += 1
    assert served >= 15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 250, 4096), (33, 509, 1024), (128, 1, 2048)])
def test_larger_sizes_of_odd_n(m, n, k, dtype, record, seed):
    """Sizes at which oneDNN goes through its blocks more than once, with N that fills none."""
    problem = made("w4a16-g128-asym", m, n, k, dtype, seed)
    y = operands(problem.weight, dtype).given_to(ops.int4_mm, problem.x)
    record.judge(f"oneDNN u4, {dtype}, larger sizes", f"({m}, {n}, {k})", problem, y, seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_code_at_each_place_against_each_zero_point(dtype):
    """x is the identity, so that the result is the weight as oneDNN reads it: bit for bit the dequantized one."""
    weight = every_code(dtype)
    y = operands(weight).given_to(ops.int4_mm, torch.eye(weight.shape[1], dtype=dtype))
    assert torch.equal(y, weight.dequantize(dtype).t())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_bytes_shows(mistake, seed):
    """The test of these tests: what is packed wrong leaves the contract's tolerance, and what is right keeps it."""
    problem = made("w4a16-g32-asym", 5, 20, 160, torch.bfloat16, seed)
    right = operands(problem.weight, torch.bfloat16)
    assert LINEAR.judge(problem, right.given_to(ops.int4_mm, problem.x)).ok
    assert not LINEAR.judge(problem, MISTAKES[mistake](right).given_to(ops.int4_mm, problem.x)).ok


def signed(weight, **changes):
    """What `matmul` takes of an int4 weight in `PLAIN`: its bytes as s4, its zero points as they are stored."""
    (n, k), parts = weight.shape, {"data": weight.data, "scale": weight.scale, "zero": weight.zero, **changes}
    weights = Matrix(parts["data"], (k, n), (1, parts["data"].shape[1] * 2), "s4")
    return weights, ops.grouped(parts["scale"], parts["zero"], weight.format.group(k))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", INT4)
def test_plain_is_what_onednn_calls_s4(scheme, dtype, record, seed):
    """Two's complement, low nibble first, zero points in the domain of signed codes or none: `PLAIN` is s4."""
    for name, case in problems(scheme, dtype, seed):
        problem = for_the_op(case)
        if whole(problem):
            y = ops.matmul(problem.x, *signed(problem.weight))
            record.judge(f"oneDNN s4, {dtype}", name, problem, y, seed)


SIGNED_MISTAKES = {
    "nibbles of a byte swapped": lambda w: {"data": (w.data << 4) | (w.data >> 4)},
    "unsigned codes": lambda w: {"data": w.data ^ 0x88},
    "zero point of the other sign": lambda w: {"zero": -w.zero},
    "zero point with an offset": lambda w: {"zero": w.zero + 8},
    "scales transposed": lambda w: {"scale": transposed(w.scale)},
}


@pytest.mark.parametrize("mistake", SIGNED_MISTAKES)
def test_a_mistake_in_signed_bytes_shows(mistake, seed):
    """The test of the one above."""
    problem = made("w4a16-g32-asym", 5, 20, 160, torch.bfloat16, seed)
    wrong = signed(problem.weight, **SIGNED_MISTAKES[mistake](problem.weight))
    assert LINEAR.judge(problem, ops.matmul(problem.x, *signed(problem.weight))).ok
    assert not LINEAR.judge(problem, ops.matmul(problem.x, *wrong)).ok
