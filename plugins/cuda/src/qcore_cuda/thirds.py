"""float32 activations: three bfloat16 matrices whose sum they are, and how `gemm` multiplies those."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from .device import Device
from .dispatch import Config, Problem, tuned
from .kernels import thirds
from .launch import launch, options
from .replay import empty

PARTS = 3
_COLUMNS = 512
"""Columns of a program that splits or adds."""


def split(x: Tensor, columns: int, device: Device, *, arranged: bool = False) -> Tensor:
    """Float32 x ``(M, K)``, of any strides, as bfloat16 ``(3M, columns)``; see `kernels.thirds.split`."""
    m, k = x.shape
    out = empty((PARTS * m, columns), torch.bfloat16, x.device)
    launch(
        thirds.split, (m, -(-columns // _COLUMNS)), x, out, k, columns, *x.stride(), m * columns,
        ARRANGED=arranged, B=_COLUMNS, **options(device, 4),
    )  # fmt: skip
    return out


def add(parts: Tensor, bias: Tensor | None, out_dtype: torch.dtype, device: Device) -> Tensor:
    """The sum of float32 ``(3M, N)`` and the bias, rounded once: ``(M, N)``."""
    m, n = parts.shape[0] // PARTS, parts.shape[1]
    y = empty((m, n), out_dtype, parts.device)
    launch(
        thirds.add, (m, -(-n // _COLUMNS)), parts, parts if bias is None else bias, y, n, m * n,
        BIAS=bias is not None, B=_COLUMNS, **options(device, 4),
    )  # fmt: skip
    return y


@lru_cache(maxsize=4096)
def choose(device: Device, problem: Problem) -> Config:
    """The configuration of `gemm` for M rows in three parts: what was measured here, else `rule`."""
    fields = tuned("float", device, problem)
    with contextlib.suppress(TypeError):  # written by hand, or damaged
        if fields:
            return Config(**fields)
    return rule(device, problem)


def rule(device: Device, problem: Problem) -> Config:
    """The largest tile of which there are enough for all multiprocessors; the smallest, and K split, if none is."""
    shapes = _HOPPER if device.arch == 90 else _ELSEWHERE
    config = next((shape for shape in shapes if 3 * _tiles(shape, problem) >= 2 * device.sms), shapes[-1])
    split = min(8, 2 * device.sms // _tiles(config, problem), problem.k // 384)
    return replace(config, split=1 << max(0, split.bit_length() - 1))


def candidates(device: Device, problem: Problem) -> list[Config]:
    """What ``qcore tune`` measures."""
    shapes = _HOPPER if device.arch == 90 else _ELSEWHERE
    spread = [replace(shape, split=split) for shape, split in product(shapes, (1, 2, 4, 8))]
    return list(dict.fromkeys((rule(device, problem), *spread)))


def _tiles(config: Config, problem: Problem) -> int:
    return -(-problem.n // config.bn) * -(-problem.rows // config.bm)


# Of each stage three tiles of x and one of W have to fit into shared memory, and what is multiplied into registers.
_ELSEWHERE = (Config("gemm", 64, 16, stages=3),)
_HOPPER = (Config("gemm", 128, 64, 8, 3), Config("gemm", 64, 32, stages=3), Config("gemm", 64, 16, stages=4))
