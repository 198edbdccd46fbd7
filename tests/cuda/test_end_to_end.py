"""The kernels of the contract `linear` as qcore calls them, through to Triton, interpreted.

Around every packed tensor there is memory that holds NaN or extreme numbers: who reads beyond an end is seen.
"""

from __future__ import annotations

import pytest
import torch
from grids import sampled

from qcore.contracts import LINEAR
from qcore.weights.schemes import SCHEMES, Scheme
from qcore_cuda.linear import kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = ("w4a8-g32-asym-token", "w4a8-g32-asym-token-o8t")
MORE = ("w8a16-g96-fzp", "w4a16-g96-asym", "w8a8-g32-asym-aasym", "w8a8-g96-fzp-static")
SHAPES = ("rows-1", "rows-17", "k-odd", "k-ragged", "n-20", "batched", "bias-float32", "strided-odd")
GUARD = 256


def cases():
    every = LINEAR.cases(map(Scheme.parse, (*SCHEMES, *MORE)), DTYPES)
    found = [case for case in every if case.id.rstrip("]").endswith(tuple(f"-{name}" for name in SHAPES))]
    # Every scheme meets every shape, in one of the dtypes.
    return [case for i, case in enumerate(found) if i % 3 == i // (3 * len(SHAPES)) % 3]


def guarded(tensor):
    """The same tensor, in the middle of memory that nobody should read."""
    size = tensor.numel()
    around = torch.empty(size + 2 * GUARD, dtype=tensor.dtype)
    around.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
    around[GUARD : GUARD + size] = tensor.flatten()
    return around[GUARD : GUARD + size].view(tensor.shape)


@pytest.mark.parametrize("case", sampled(cases(), 67), ids=lambda case: case.id)
def test_contract(interpreter, case):
    problem = case.build(seed=7)
    mine = kernel(problem.request)
    packed = {name: guarded(tensor) for name, tensor in mine.pack(problem.weight).items()}
    verdict = LINEAR.judge(problem, mine(problem.x, packed, problem.bias, **problem.given))
    assert verdict.ok, verdict.message
