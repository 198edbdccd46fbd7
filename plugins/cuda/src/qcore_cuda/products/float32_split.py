"""float32 activations: split into a sum of three bfloat16 matrices, and the kernels that multiply those.

`GEMM` adds the three products up as it goes; the kernels for few rows see three times as many rows, of 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from qcore_triton.weights import Weight

from ..costs import Work
from ..kernels import float32_split
from ..problem import TERMS, GemmProblem
from ..runtime.device import Device
from ..runtime.launch import launch, options
from ..runtime.replay import empty
from .base import Choice, FloatProduct
from .gemm import Tile, adapted, multiply, reads_rows
from .skinny_gemm import ROWS

_COLUMNS = 512
"""Columns of a program that splits or adds."""


def split(x: Tensor, columns: int, device: Device, *, arranged: bool = False) -> Tensor:
    """Float32 x ``(M, K)``, of any strides, as bfloat16 ``(3M, columns)``; see `kernels.float32_split.split`."""
    m, k = x.shape
    out = empty((TERMS * m, columns), torch.bfloat16, x.device)
    launch(
        float32_split.split, (m, -(-columns // _COLUMNS)), x, out, k, columns, *x.stride(), m * columns,
        ARRANGED=arranged, B=_COLUMNS, **options(device, 4),
    )  # fmt: skip
    return out


def add(terms: Tensor, bias: Tensor | None, out_dtype: torch.dtype, device: Device) -> Tensor:
    """The sum of float32 ``(3M, N)`` and the bias, rounded once: ``(M, N)``."""
    m, n = terms.shape[0] // TERMS, terms.shape[1]
    y = empty((m, n), out_dtype, terms.device)
    launch(
        float32_split.add, (m, -(-n // _COLUMNS)), terms, terms if bias is None else bias, y, n, m * n,
        BIAS=bias is not None, B=_COLUMNS, **options(device, 4),
    )  # fmt: skip
    return y


class SplitRows(FloatProduct[Any]):
    """Few rows by a kernel for 16-bit floats, whose name and configurations it shares."""

    def __init__(self, inner: FloatProduct[Any]) -> None:
        self._inner = inner
        self.name, self.config = inner.name, inner.config  # type: ignore[misc]

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        if problem.rounded:  # to 16 bits, which float32 must not be
            return False
        return 0 < problem.split_rows <= ROWS and self._inner.serves(device, _of_terms(problem))

    def rule(self, device: Device, problem: GemmProblem) -> Any:
        return self._inner.rule(device, _of_terms(problem))

    def candidates(self, device: Device, problem: GemmProblem) -> Iterable[Any]:
        return self._inner.candidates(device, _of_terms(problem))

    def adapted(self, problem: GemmProblem, config: Any) -> Choice | None:
        return None if self._inner.adapted(_of_terms(problem), config) is None else Choice(self, config)

    def work(self, device: Device, problem: GemmProblem, config: Any) -> Work:
        return self._inner.work(device, _of_terms(problem), config)

    def launch(
        self, x: Tensor, weight: Weight, bias: Tensor | None, device: Device, problem: GemmProblem, config: Any
    ) -> Tensor:
        terms = split(x, weight.columns, device)
        return add(
            self._inner.launch(terms, weight, None, device, _of_terms(problem), config), bias, problem.out_dtype, device
        )


@lru_cache(maxsize=4096)
def _of_terms(problem: GemmProblem) -> GemmProblem:
    """The problem of the kernel for 16-bit floats that multiplies the terms."""
    return replace(problem, rows=problem.split_rows, split_rows=0, x_dtype=torch.bfloat16, out_dtype=torch.float32)


# Three tiles of x and one of W per stage have to fit shared memory, and the operands registers.
_ELSEWHERE = (Tile(64, 16, stages=3),)
_HOPPER = (Tile(128, 64, 8, 3), Tile(64, 32, stages=3), Tile(64, 16, stages=4))


class SplitTiles(FloatProduct[Tile]):
    """Any number of rows by `kernels.gemm`, which unpacks a weight once for all three terms."""

    name: ClassVar[str] = "float32_split"
    config = Tile

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        del device
        return not problem.narrow and not problem.rounded

    def adapted(self, problem: GemmProblem, config: Tile) -> Choice | None:
        return adapted(self, problem, config._replace(scaled=config.scaled or problem.halves))

    def rule(self, device: Device, problem: GemmProblem) -> Tile:
        """The largest tile that occupies all multiprocessors; if none does, the smallest, with K split."""
        tiles = _HOPPER if device.arch == 90 else _ELSEWHERE
        config = next((tile for tile in tiles if 3 * _count(tile, problem) >= 2 * device.sms), tiles[-1])
        config = config._replace(scaled=problem.halves)
        shared = min(8, 2 * device.sms // _count(config, problem), problem.k // 384)
        return config._replace(split=1 << max(0, shared.bit_length() - 1))

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Tile]:
        if problem.split_rows <= ROWS and (device.asm or problem.bits == 8):
            return  # kernels for few rows are faster
        for tile in _HOPPER if device.arch == 90 else _ELSEWHERE:
            yield from (tile._replace(split=split) for split in (1, 2, 4, 8))

    def work(self, device: Device, problem: GemmProblem, config: Tile) -> Work:
        del device
        return Work(_count(config, problem) * config.split, problem.k / (128 * config.split))

    def launch(
        self, x: Tensor, weight: Weight, bias: Tensor | None, device: Device, problem: GemmProblem, config: Tile
    ) -> Tensor:
        terms = split(x, weight.columns, device, arranged=reads_rows(problem))
        return multiply(terms, x.shape[0], weight, bias, device, problem, config)


def _count(tile: Tile, problem: GemmProblem) -> int:
    return -(-problem.n // tile.bn) * -(-problem.rows // tile.bm)


FLOAT32_SPLIT = SplitTiles()
