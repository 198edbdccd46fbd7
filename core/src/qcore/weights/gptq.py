"""GPTQ: the rounding error of a weight's column is compensated by the columns that are not rounded yet.

A layer computes ``W x``. With the second moments ``H = sum x x^T`` of its inputs, the squared error of the output is
``tr((W - Q) H (W - Q)^T)``. Columns are rounded in order; the error of column k, spread over the later columns as

    W[:, j] -= (W[:, k] - Q[:, k]) / U[k, k] * U[k, j]        j > k,  U upper triangular,  U^T U = H^-1

leaves the least such error that the later columns can still reach.

Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", ICLR 2023, arXiv:2210.17323, equation 3 and algorithm 1: lazy updates in blocks, the Cholesky form of the
inverse, damping by a share of the mean diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import FormatError

P = TypeVar("P")

_BLOCK = 128
"""Columns whose errors are gathered before they reach the rest of the weight: one matrix product instead of many."""

_DAMPING = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Shares of the mean diagonal that are added to the diagonal, the next where a factor cannot be found."""


class Grid(Protocol[P]):
    """How a group's values become codes of ``code_dtype``."""

    @property
    def code_dtype(self) -> torch.dtype: ...

    def fit(self, group: Tensor) -> P:
        """The parameters of a group ``(n, g)``, one set per row."""
        ...

    def round(self, column: Tensor, parameters: P) -> tuple[Tensor, Tensor]:
        """The codes of a column ``(n,)`` of the group, and the values that they stand for."""
        ...


def inverse_factor(moments: Tensor, name: str = "weight") -> Tensor:
    """U, upper triangular, with ``U^T U = (H + damping)^-1``; float32 ``(K, K)``, on the device of ``moments``.

    ``moments``: H, ``(K, K)``. An input that was always 0 has a zero row and column: damping makes it independent of
    the others, so that its error stays its own. Raises `FormatError` where H holds NaN or Inf, or is no sum of x x^T.
    """
    # With P reversing the order, P H P = L L^T gives H = R R^T for the upper triangular R = P L P, so U = R^-1:
    # one factorization where inverting H first would take two, and would square the condition number.
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
        f"the moments for {name} are no sum of x x^T over finite inputs.\n"
        f"Calibrate with inputs that are finite, or use the quantizer mse for this layer."
    )


def compensate(weight: Tensor, factor: Tensor, group: int, grid: Grid[P]) -> tuple[Tensor, list[P]]:
    """Round a weight column by column.

    **Arguments:**

    - ``weight``: float32 ``(n, K)``; ``factor``: U from `inverse_factor`.
    - ``group``: columns that share parameters; the last group may be ragged. They are fitted to the group's values as
      the columns before it left them.

    Returns codes ``(n, K)``, and the parameters of each group. A row of a group that is all zero in ``weight``
    stays zero, whatever error reaches it; that is passed on.
    """
    sweep = _Sweep(weight, factor, group, grid)
    for start, stop in _blocks(weight.shape[1], group):
        sweep.block(start, stop)
    return sweep.codes.t().contiguous(), sweep.parameters


def _blocks(k: int, group: int) -> Iterator[tuple[int, int]]:
    """Blocks of columns. A group begins where a block does or lies within one, so that it is fitted to final values."""
    span = _BLOCK // group * group or group
    for start in range(0, k, span):
        end = min(start + span, k)
        for at in range(start, end, _BLOCK):
            yield at, min(at + _BLOCK, end)


class _Sweep(Generic[P]):
    """The weight on its way: transposed, so that a column lies together in memory."""

    def __init__(self, weight: Tensor, factor: Tensor, group: int, grid: Grid[P]) -> None:
        self.weight, self.factor, self.group, self.grid = weight, factor, group, grid
        self.rest = weight.t().clone(memory_format=torch.contiguous_format)
        self.codes = torch.empty_like(self.rest, dtype=grid.code_dtype)
        self.parameters: list[P] = []
        self.diagonal = factor.diagonal().tolist()

    def block(self, start: int, stop: int) -> None:
        """Round the columns of a block, then bring their errors to all columns behind it."""
        errors = torch.empty_like(self.rest[start:stop])
        for k in range(start, stop):
            if k % self.group == 0:
                self._open_group(k)
            error = errors[k - start].copy_(self._error(k))
            self.rest[k + 1 : stop].addr_(self.factor[k, k + 1 : stop], error, alpha=-1)
        self.rest[stop:].addmm_(self.factor[start:stop, stop:].t(), errors, alpha=-1)

    def _open_group(self, start: int) -> None:
        columns = slice(start, start + self.group)
        self.empty = (self.weight[:, columns] == 0).all(dim=1)
        values = self.rest[columns].masked_fill(self.empty, 0)
        self.parameters.append(self.grid.fit(values.t().contiguous()))

    def _error(self, k: int) -> Tensor:
        column = self.rest[k]
        codes, values = self.grid.round(column.masked_fill(self.empty, 0), self.parameters[-1])
        self.codes[k] = codes
        return (column - values).div_(self.diagonal[k])
