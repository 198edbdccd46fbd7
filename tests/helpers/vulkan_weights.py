"""Weights of random codes, for what stores them on a device."""

from __future__ import annotations

import torch

from qcore import Format, QTensor, ZeroPoint


def weight_of(text: str, n: int, k: int, dtype: torch.dtype = torch.float32) -> QTensor:
    """A weight ``(n, k)`` of random codes in a format, its scales and float zero points in ``dtype``."""
    fmt = Format.parse(text)
    generator = torch.Generator().manual_seed(n * k)
    low, high = fmt.code_range
    codes = torch.randint(low, high + 1, (n, k), generator=generator).to(torch.int8)
    scale = (torch.rand(fmt.groups(k), n, generator=generator) + 0.1).to(dtype)
    zero = None
    if fmt.zero is ZeroPoint.INT:
        zero = torch.randint(low, high + 1, scale.shape, generator=generator).to(torch.int8)
    elif fmt.zero is ZeroPoint.FLOAT:
        zero = torch.randn(scale.shape, generator=generator).to(dtype)
    return QTensor.from_codes(codes, scale, zero, fmt)


def same(a: QTensor, b: QTensor) -> bool:
    """Whether two weights are the same, bit for bit."""
    if (a.shape, a.format, a.scale.dtype) != (b.shape, b.format, b.scale.dtype):
        return False
    return all(torch.equal(mine, b.tensors()[name]) for name, mine in a.tensors().items())
