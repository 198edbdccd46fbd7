"""Torch stand-ins for the products of qcore-cuda, with their signatures: its wiring is tested with them, quickly."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from qcore import DynamicFP8, StaticFP8
from qcore.formats import find_element
from qcore.weights.activations import dynamic_parameters, fp8_scale, quantize_fp8, quantize_int8
from qcore_triton import packing

NAMES = {"e4m3": "fp8", "e5m2": "fp8_e5m2", "e2m1": "fp4"}
"""Elements by their text in `Weight.element`."""


def values_of(weight):
    """The numbers ``(n, k)`` that the codes of a packed weight stand for."""
    decode = packing._planar_codes if weight.bits == 4 else packing._row_codes
    codes = decode(weight.data, weight.k)[: weight.n]
    if weight.element == "int":
        return codes.double() - (8 if weight.bits == 4 else 0)
    if weight.element.startswith("t"):
        table = torch.tensor(struct.unpack(">16f", bytes.fromhex(weight.element[1:])), dtype=torch.float64)
    else:
        table = torch.tensor(find_element(NAMES[weight.element]).values, dtype=torch.float64)
    return table[codes.view(torch.uint8).long()]


def scales_of(weight):
    """The numbers, ``(G, n)`` and more columns, that packed scales stand for."""
    if weight.scale.dtype == torch.uint8:
        return torch.exp2(weight.scale.double() - 127)
    scale = weight.scale.view(torch.float8_e4m3fn) if weight.scale.dtype == torch.int8 else weight.scale
    return scale.double() if weight.factor is None else scale.double() * weight.factor.double()


def spread(values, weight):
    """``(G, n)`` and more columns to ``(n, k)``."""
    return values[:, : weight.n].double().repeat_interleave(weight.group, 0)[: weight.k].t()


def dense(weight):
    codes, scale = values_of(weight), spread(scales_of(weight), weight)
    if weight.zero is None:
        return codes * scale
    zero = spread(weight.zero, weight)
    return (codes - zero) * scale if weight.zero.dtype == torch.int8 else codes * scale + zero


def float_linear(x, weight, bias, out_dtype):
    assert x.dim() == 2
    assert not torch.is_autocast_enabled("cuda")
    y = x.double() @ dense(weight).t()
    return (y if bias is None else y + bias.double()).to(out_dtype)


def quantized(x, symmetric, given):
    """Codes of x, and scale and zero point ``(M,)``: None for none."""
    if given is None:
        scale, zero = dynamic_parameters(x, symmetric)
        return quantize_int8(x, scale, zero), scale.flatten(), None if zero is None else zero.flatten()
    rows = x.shape[0]
    scale = given.scale.reshape(-1) if isinstance(given.scale, Tensor) else torch.full((rows,), given.scale)
    zero = given.zero.reshape(-1).float() if isinstance(given.zero, Tensor) else torch.full((rows,), float(given.zero))
    codes = x if x.dtype == torch.int8 else quantize_int8(x, scale[:, None], zero[:, None])
    return codes, scale, zero


def int8_product(x, weight, sums, bias, out_dtype, symmetric=True, given=None, out=None):
    """Corrects zero points of activations by ``sums``, as the kernels do."""
    codes, x_scale, x_zero = quantized(x, symmetric, given)
    assert (sums is None) == (x_zero is None)
    y = codes.double() @ dense(weight).t()
    if x_zero is not None:
        correction = (sums.double() * weight.scale.double()).sum(0)[: weight.n]
        if weight.zero is not None and weight.zero.dtype != torch.int8:
            correction = correction + spread(weight.zero, weight).sum(1)
        y = y - x_zero.double()[:, None] * correction
    y = y * x_scale.double()[:, None]
    if bias is not None:
        y = y + bias.double()
    if out is None:
        return y.to(out_dtype)
    scale, zero = out
    if isinstance(scale, Tensor):
        scale, zero = scale[:, None], zero[:, None]
    return (torch.round(y / scale) + zero).clamp(-128, 127).to(out_dtype)


def fp8_product(x, weight, bias, out_dtype, group, static, squares=None):
    """Quantizes as the contract says."""
    scale = fp8_scale(DynamicFP8(group or None) if static is None else StaticFP8(static), x)
    values = quantize_fp8(x, scale).double() * scale.double()
    return float_linear(values, weight, bias, out_dtype)


def gather(indices, weight, dtype):
    return dense(weight)[indices].to(dtype)
