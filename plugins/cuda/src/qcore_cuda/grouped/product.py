"""``grouped_linear``: prepare x, choose a kernel by the form of the call, launch it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from qcore_triton.codes import Mode

from ..problem import Form, form_of
from ..products.aligned import aligned
from ..products.float32_split import split
from ..products.gemm import Tile, arranged, reads_rows
from ..runtime.device import Device, device_of
from . import few, hopper, tiles
from .choice import choose
from .codes import centred
from .few import Few
from .hopper import Many
from .problem import Experts, GroupedProblem, grouped_problem


class GroupedPlan(NamedTuple):
    """The plan for a form of call."""

    device: Device
    problem: GroupedProblem
    config: Few | Tile | Many


def grouped_linear(
    x: Tensor, experts: Experts, bias: Tensor | None, offsets: Tensor, out_dtype: torch.dtype, mode: Mode | None
) -> Tensor:
    """``(T, N)`` of ``out_dtype``: x ``(T, K)`` of any strides, T >= 1, times the weights of its rows' experts.

    ``offsets``: int32 ``(E,)``, contiguous, read on the device; ``bias``: ``(E, N)``, contiguous. ``mode``: of int8
    activations, None for float ones.
    """
    return run(x, experts, bias, offsets, mode, plan(x, experts, out_dtype, mode))


def run(
    x: Tensor, experts: Experts, bias: Tensor | None, offsets: Tensor, mode: Mode | None,
    chosen: GroupedPlan,
) -> Tensor:  # fmt: skip
    """`grouped_linear` by a plan."""
    device, problem, config = chosen
    gemm, first, scale = problem.gemm, experts.first, None
    rows = reads_rows(gemm) and isinstance(config, Tile)
    if mode is not None:
        x, scale = centred(x, mode, first.columns, 128 if rows else 0, device)
    elif not gemm.narrow:
        x = split(x, first.columns, device, arranged=rows)
    else:
        x = aligned(x, first, device)
        x = arranged(x, device) if rows else x
    if isinstance(config, Tile):
        return tiles.multiply(x, scale, experts, bias, offsets, device, problem, config)
    if isinstance(config, Few):
        return few.multiply(x, scale, experts, bias, offsets, device, problem, config)
    return hopper.multiply(x, scale, experts, bias, offsets, device, problem, config)


def plan(x: Tensor, experts: Experts, out_dtype: torch.dtype, mode: Mode | None) -> GroupedPlan:
    """The plan for a call, made once for each of its forms."""
    return _plan(x.device, x.dtype, out_dtype, x.shape[0], form_of(experts.first), experts.number, mode is not None)


@lru_cache(maxsize=8192)
def _plan(
    where: torch.device, x_dtype: torch.dtype, out_dtype: torch.dtype, rows: int, form: Form, experts: int, codes: bool
) -> GroupedPlan:
    device, problem = device_of(where), grouped_problem(form, experts, rows, x_dtype, out_dtype, codes=codes)
    return GroupedPlan(device, problem, choose(device, problem))
