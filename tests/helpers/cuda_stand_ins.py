"""Torch stand-ins for the products of qcore-cuda, with their signatures: its wiring is tested with them, quickly."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qcore.activations import dynamic_parameters, quantize_int8
from qcore_cuda import packing


class Codes(NamedTuple):
    q: Tensor
    scale: Tensor
    zero: Tensor | None
    total: bool


def codes_of(weight):
    """Signed codes ``(n, k)`` of a packed weight."""
    decode = packing._planar_codes if weight.bits == 4 else packing._row_codes
    return decode(weight.data, weight.k)[: weight.n].double()


def spread(values, weight):
    """``(G, n)`` to ``(n, k)``."""
    return values.double().repeat_interleave(weight.group, 0)[: weight.k].t()


def dense(weight):
    codes, scale = codes_of(weight), spread(weight.scale, weight)
    if weight.zero is None:
        return codes * scale
    zero = spread(weight.zero, weight)
    return (codes - zero) * scale if weight.zero.dtype == torch.int8 else codes * scale + zero


def float_linear(x, weight, bias, out_dtype):
    assert x.dim() == 2
    assert not torch.is_autocast_enabled("cuda")
    y = x.double() @ dense(weight).t()
    return (y if bias is None else y + bias.double()).to(out_dtype)


def quantize_rows(x, *, symmetric, total=False, order=0):
    scale, zero = dynamic_parameters(x, symmetric)
    return Codes(quantize_int8(x, scale, zero), scale.flatten(), None if zero is None else zero.flatten(), total)


def quantize_given(x, scale, zero, *, total=False, order=0):
    rows = x.shape[0]
    scale = scale.reshape(-1) if isinstance(scale, Tensor) else torch.full((rows,), scale)
    zero = zero.reshape(-1).float() if isinstance(zero, Tensor) else torch.full((rows,), float(zero))
    q = x if x.dtype == torch.int8 else quantize_int8(x, scale[:, None], zero[:, None])
    return Codes(q, scale, zero, total)


def int8_linear(codes, weight, sums, bias, out_dtype, out_scale=None, out_zero=None):
    """Corrects zero points of activations by ``sums``, as the kernels do."""
    assert (sums is None) == (codes.zero is None)
    assert codes.total == (weight.zero is not None and weight.scale.shape[0] == 1)
    q = codes.q.double()
    y = q @ dense(weight).t()
    if codes.zero is not None:
        correction = (sums.double() * weight.scale.double()).sum(0)
        if weight.zero is not None and weight.zero.dtype != torch.int8:
            correction = correction + spread(weight.zero, weight).sum(1)
        y = y - codes.zero.double()[:, None] * correction
    y = y * codes.scale.double()[:, None]
    if bias is not None:
        y = y + bias.double()
    if out_scale is None:
        return y.to(out_dtype)
    if isinstance(out_scale, Tensor):
        out_scale, out_zero = out_scale[:, None], out_zero[:, None]
    return (torch.round(y / out_scale) + out_zero).clamp(-128, 127).to(out_dtype)


def gather(indices, weight, dtype):
    return dense(weight)[indices].to(dtype)
