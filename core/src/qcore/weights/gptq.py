"""GPTQ: the rounding error of a weight's column is compensated by the columns that are not rounded yet.

A layer computes ``W x``. With the second moments ``H = sum x x^T`` of its inputs, the squared error of the output is
``tr((W - Q) H (W - Q)^T)``. Columns are rounded in order; the error of column k, spread over the later columns as

    W[:, j] -= (W[:, k] - Q[:, k]) / U[k, k] * U[k, j]        j > k,  U upper triangular,  U^T U = H^-1

leaves the smallest such error that the later columns can still achieve.

Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", ICLR 2023, arXiv:2210.17323, equation 3 and algorithm 1: lazy updates in blocks, the Cholesky form of the
inverse, damping by a fraction of the mean diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import FormatError

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)

_BLOCK = 128
"""Columns whose errors are collected before they are applied to the rest of the weight: one matrix product for all."""

_DAMPING = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Fractions of the mean diagonal to add to the diagonal; the next one is used if the factorization fails."""


class Grid(Protocol[P_contra]):
    """Rounds a group's values to codes of ``code_dtype``."""

    @property
    def code_dtype(self) -> torch.dtype: ...

    def round(self, column: Tensor, parameters: P_contra) -> tuple[Tensor, Tensor]:
        """The codes of a column ``(n,)`` of the group, and the values that they represent."""
        ...


def inverse_factor(moments: Tensor, name: str = "weight") -> Tensor:
    """U, upper triangular, with ``U^T U = (H + damping)^-1``; float32 ``(K, K)``, on the device of ``moments``.

    ``moments``: H, ``(K, K)``. An input that was always 0 has a zero row and column: damping makes it independent of
    the others, so that its error does not spread. Raises `FormatError` if H holds NaN or Inf, or is not a sum of x x^T.
    """
    # With P reversing the order, P H P = L L^T gives H = R R^T for the upper triangular R = P L P, so U = R^-1:
    # one factorization; inverting H first would take two, and would square the condition number.
    flipped = moments.to(torch.float32).flip(0, 1)
    mean = float(flipped.diagonal().mean()) if len(flipped) else 0.0
    for share in _DAMPING:
        damped = flipped + torch.eye(len(flipped), device=flipped.device).mul_(share * mean or 1.0)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed and bool(torch.isfinite(lower).all()):
            one = torch.eye(len(lower), device=lower.device)
            inverse: Tensor = torch.linalg.solve_triangular(lower, one, upper=False)
            return inverse.flip(0, 1)
    raise FormatError(
        f"the moments for {name} are not a sum of x x^T over finite inputs.\n"
        f"Calibrate with inputs that are finite, or use the quantizer mse for this layer."
    )


@dataclass(frozen=True)
class Order:
    """Columns by descending second moment, and the factor of the inverse in that order.

    **Fields:** ``columns``: int64 ``(K,)``; ``factor``: U for the moments with rows and columns in that order.
    """

    columns: Tensor
    factor: Tensor

    @classmethod
    def of(cls, moments: Tensor, name: str = "weight") -> Order:
        """The order of moments ``(K, K)``. Raises `FormatError` as `inverse_factor` does."""
        columns = moments.diagonal().argsort(descending=True, stable=True)
        return cls(columns, inverse_factor(moments[columns][:, columns], name))


def compensate(weight: Tensor, order: Order, group: int, grid: Grid[P], parameters: Sequence[P]) -> Tensor:
    """Round a weight column by column, largest inputs first: most columns are then left to compensate their errors.

    **Arguments:**

    - ``weight``: float32 ``(n, K)``.
    - ``group``: number of adjacent columns of ``weight`` that share parameters; the last group may be ragged.
    - ``parameters``: of each group, known in advance. Although columns are rounded out of order, groups consist of
      adjacent columns, so no `QTensor.order` is needed: every kernel can run the weight, and rows can be looked up.

    Returns codes ``(n, K)``. A row of a group that is all zero in ``weight`` stays zero, whatever error reaches it; the
    error is passed on.
    """
    sweep = _Sweep(weight, order, group, grid, parameters)
    for start in range(0, weight.shape[1], _BLOCK):
        sweep.block(start, min(start + _BLOCK, weight.shape[1]))
    return sweep.codes.t().contiguous()


class _Sweep(Generic[P]):
    """The weight while it is being rounded: transposed and in order, so that a column is contiguous in memory."""

    def __init__(self, weight: Tensor, order: Order, group: int, grid: Grid[P], parameters: Sequence[P]) -> None:
        self.factor, self.group, self.grid, self.parameters = order.factor, group, grid, parameters
        self.columns: list[int] = order.columns.tolist()
        self.rest = weight.t().index_select(0, order.columns)
        self.codes = torch.empty(weight.shape[::-1], dtype=grid.code_dtype, device=weight.device)
        self.empty = [(part == 0).all(dim=1) for part in torch.split(weight, group, dim=1)]
        self.diagonal = order.factor.diagonal().tolist()

    def block(self, start: int, stop: int) -> None:
        """Round the columns of a block, then apply their errors to all columns after it."""
        errors = torch.empty_like(self.rest[start:stop])
        for k in range(start, stop):
            error = errors[k - start].copy_(self._error(k))
            self.rest[k + 1 : stop].addr_(self.factor[k, k + 1 : stop], error, alpha=-1)
        self.rest[stop:].addmm_(self.factor[start:stop, stop:].t(), errors, alpha=-1)

    def _error(self, k: int) -> Tensor:
        column, at = self.rest[k], self.columns[k]
        group = at // self.group
        codes, values = self.grid.round(column.masked_fill(self.empty[group], 0), self.parameters[group])
        self.codes[at] = codes
        return (column - values).div_(self.diagonal[k])
