"""Rows of x as kernels read them, and of results as descriptors store them: they begin on 16 bytes; and sums of x."""

from __future__ import annotations

import torch
from torch import Tensor

from qcore_triton.geometry import power_of_two
from qcore_triton.weights import Weight

from ..kernels.rows import copy_rows, sum_rows
from ..problem import GemmProblem
from ..runtime.device import Device
from ..runtime.launch import launch, options
from ..runtime.replay import empty

_BYTES = 16
_COLUMNS = 2048
"""The most columns of a program that copies."""


def copies_of_x(problem: GemmProblem, multiple: int) -> tuple[int, ...]:
    """`Product.copies` if rows have to follow each other at a multiple of that many columns."""
    return (problem.rows * problem.k,) if problem.k % multiple else ()


def copies_of_result(problem: GemmProblem) -> tuple[int, ...]:
    """`Product.copies` for `finished`."""
    return (problem.rows * problem.n,) if problem.n * problem.out_dtype.itemsize % _BYTES else ()


def copies_for_sums(problem: GemmProblem) -> tuple[int, ...]:
    """`Product.copies` for `sums_of`, which reads as many values as a copy of half of x reads and writes."""
    return (problem.rows * problem.k // 2,) if problem.sums else ()


def aligned(x: Tensor, weight: Weight, device: Device) -> Tensor:
    """X ``(M, K)`` with the columns of the packed weight: x itself if it is so, else a copy filled up with zeros."""
    columns = weight.columns
    return x if x.shape[1] == columns and _fits_lines(x) else copied(x, columns, device)


def on_lines(x: Tensor, weight: Weight, device: Device, *, described: bool = True) -> Tensor:
    """X as `aligned`, for a kernel that masks columns behind K; ``described``: it reads x through a descriptor."""
    return x if _fits_lines(x, described=described) else copied(x, weight.columns, device)


def _fits_lines(x: Tensor, *, described: bool = True) -> bool:
    """Whether columns are contiguous and all rows begin on 16 bytes; a descriptor has a pitch even of one row.

    Its rows cannot overlap: copies through one of expanded rows bring zeros.
    """
    m, k = x.shape
    pitch = x.stride(0) if m > 1 else k if described else 0
    lines = x.stride(1) == 1 and pitch * x.element_size() % _BYTES == 0 and x.data_ptr() % _BYTES == 0
    return lines and (pitch >= k or not described)


def copied(x: Tensor, columns: int, device: Device) -> Tensor:
    """``(M, columns)``, contiguous: those of x ``(M, K)`` of any strides, and zeros behind them."""
    (m, k), block = x.shape, min(_COLUMNS, max(128, power_of_two(columns)))
    y = empty((m, columns), x.dtype, x.device)
    launch(copy_rows, (m, -(-columns // block)), x, y, k, columns, *x.stride(), B=block, **options(device, 4))
    return y


def sums_of(x: Tensor, problem: GemmProblem, device: Device) -> Tensor | None:
    """Sums, float32 ``(M,)``, of x with contiguous columns, if the problem needs them."""
    if not problem.sums:
        return None
    (m, columns), sums = x.shape, empty((x.shape[0],), torch.float32, x.device)
    block = min(_COLUMNS, max(128, power_of_two(columns)))
    launch(sum_rows, (m,), x, sums, columns, x.stride(0), B=block, **options(device, 4))
    return sums


def padded(bias: Tensor | None, n: int, device: Device) -> Tensor | None:
    """A bias with n values, zeros behind its own."""
    return bias if bias is None or len(bias) == n else copied(bias.view(1, -1), n, device).view(n)


def result(m: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``(M, N)`` for a kernel that stores through a descriptor: with more columns if rows would not begin on 16 bytes.

    `finished` has to follow.
    """
    each = _BYTES // dtype.itemsize
    return empty((m, -(-n // each) * each), dtype, device)


def finished(y: Tensor, n: int, device: Device) -> Tensor:
    """A `result` without the columns behind n."""
    return y if y.shape[1] == n else copied(y, n, device)
