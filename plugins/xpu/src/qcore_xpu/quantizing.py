"""Activations to int8 codes, per token: by Triton if it is available, else by torch ops, with the same results."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore.plugin_api import dynamic_parameters, quantize_int8
from qcore_triton.codes import SYMMETRIC, TENSOR, Codes, Given, Mode, columns_of_codes, flat, mode_of
from qcore_triton.geometry import power_of_two

from .device import empty, launch, options, sub_groups, why_not_triton

_IN_REGISTERS = 8192
"""Values that a program holds, 512 per sub-group: several rows, or one; longer rows are read twice."""


def rows(x: Tensor, symmetric: bool, given: Given | None, *, total: bool = False, order: int = 0) -> Codes:
    """Quantize x ``(M, K)`` of any strides.

    Without ``given`` each token gets its own parameters, ``symmetric`` or not; with it, an int8 x already holds codes.
    ``total``: also sum the codes; ``order``: column order of the weight that they multiply, supported by Triton only.
    """
    mode = mode_of(x, symmetric, given)
    if why_not_triton():
        assert not order, "an order of columns is only for products in Triton"
        return _by_torch(x, mode, total)
    return _by_triton(x, mode, total, order)


def _by_triton(x: Tensor, mode: Mode, total: bool, order: int) -> Codes:
    from qcore_triton import host

    m, k = x.shape
    block = min(_IN_REGISTERS, power_of_two(columns_of_codes(k)))
    together = 0 if k > block else min(power_of_two(m), _IN_REGISTERS // block)
    meta = options(sub_groups(block * max(1, together)))
    return host.quantize_rows(launch, empty, x, mode, total=total, order=order, block=block, rows=together, **meta)


def _by_torch(x: Tensor, mode: Mode, total: bool) -> Codes:
    """`kernels.quantize.quantize_rows` in torch ops."""
    scale, zero = _parameters(x, mode)
    q = x if x.dtype == torch.int8 else quantize_int8(x, scale, zero)
    if x.dtype != torch.int8:
        bad = x.isnan().any(-1, keepdim=True) if mode.kind >= TENSOR else scale.isinf()
        scale = torch.where(bad, torch.nan, scale)
    q = pad(q, (0, columns_of_codes(x.shape[1]) - x.shape[1]))
    return Codes(q, flat(scale), None if zero is None else flat(zero), q.sum(1, dtype=torch.int32) if total else None)


def _parameters(x: Tensor, mode: Mode) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point, float32 ``(M, 1)``."""
    if mode.kind < TENSOR:
        return dynamic_parameters(x, mode.kind == SYMMETRIC)
    if mode.kind == TENSOR:
        ones = x.new_ones((x.shape[0], 1), dtype=torch.float32)
        return ones * mode.scale, ones * mode.zero
    return mode.scale.float().unsqueeze(1), mode.zero.float().unsqueeze(1)
