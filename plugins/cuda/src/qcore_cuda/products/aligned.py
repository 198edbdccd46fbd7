"""Float activations as kernels read them: as many columns as the packed weight, rows on 16 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from qcore_triton.weights import Weight

from ..problem import GemmProblem


def aligned(x: Tensor, weight: Weight, problem: GemmProblem) -> Tensor:
    """X ``(M, K)`` with the columns of the packed weight: x itself if it is so, else a copy filled up with zeros."""
    columns, stride = columns_of(weight, problem), x.stride()
    if x.shape[1] == columns and stride[1] == 1 and stride[0] % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    if x.shape[1] == columns:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    filled = x.new_zeros((x.shape[0], columns))
    filled[:, : x.shape[1]] = x
    return filled


def columns_of(weight: Weight, problem: GemmProblem) -> int:
    """The columns of x that the packed weight has codes for, zeros behind K included."""
    return weight.data.shape[1] * (problem.block if problem.bits == 4 else 1)
