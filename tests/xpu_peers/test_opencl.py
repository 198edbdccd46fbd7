"""Kernels of ours that read `PLAIN_INT32` as the XPU op does, compiled and run by Intel's OpenCL runtime on the CPU.

Proven: the neutral bytes, with zero points in 0..15 and scales (G, N), hold all that is needed to compute the contract
`linear`, when read by a compiler of Intel's with the rules of OpenCL: order of nibbles, unsigned codes, the order of
scales and zero points, their dtypes; by sub-groups of 16 and through local memory.

Not proven: anything of the GPU itself. Neither speed, nor its memory model, nor the matrix engines (DPAS), nor the op
in torch: that is oneDNN's kernel, see `test_onednn_int4`.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import xpu_peers_opencl as opencl
from xpu_peers_problems import DTYPES, INT4, MISTAKES, every_code, for_the_op, made, operands, problems

from qcore.contracts import LINEAR

each_kernel = pytest.mark.parametrize("kernel", opencl.KERNELS)


def test_the_runtime_is_intels():
    """What the other tests show, they show of this runtime. It reads words as torch writes them: low byte first."""
    device = opencl.device()
    assert (device.vendor, device.endian_little) == ("Intel(R) Corporation", True)


@each_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", INT4)
def test_neutral_bytes_give_the_numbers_of_the_contract(kernel, scheme, dtype, record, seed):
    """Every case of the contract with fresh random numbers: skewed weights, ragged K, tiny scales, large x; no bias."""
    op = partial(opencl.int4_mm, kernel)
    for name, case in problems(scheme, dtype, seed):
        problem = for_the_op(case)
        y = operands(problem.weight).given_to(op, problem.x)
        record.judge(f"OpenCL {kernel}, {dtype}, neutral bytes", name, problem, y, seed)


@each_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_code_at_each_place_against_each_zero_point(kernel, dtype):
    """x is the identity, so that the result is the weight as the kernel reads it: bit for bit the dequantized one."""
    weight = every_code(dtype)
    y = operands(weight).given_to(partial(opencl.int4_mm, kernel), torch.eye(weight.shape[1], dtype=dtype))
    assert torch.equal(y, weight.dequantize(dtype).t())


@each_kernel
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_bytes_shows(kernel, mistake, seed):
    """The test of these tests: what is packed wrong leaves the contract's tolerance, and what is right keeps it."""
    problem, op = made("w4a16-g32-asym", 5, 20, 160, torch.bfloat16, seed), partial(opencl.int4_mm, kernel)
    right = operands(problem.weight)
    assert LINEAR.judge(problem, right.given_to(op, problem.x)).ok
    assert not LINEAR.judge(problem, MISTAKES[mistake](right).given_to(op, problem.x)).ok
