"""The stand-ins themselves: what each op computes, from its documented semantics.

They round as coarsely as the device may, so that a kernel which relies on more fails here.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .constraints import check_int, check_int4, check_int8
from .recording import record


@lru_cache(maxsize=1)
def replace_device() -> None:
    """Put the stand-ins where qcore-xpu looks for the device's ops, and register its own ops for CPU tensors."""
    from qcore_xpu import aten

    aten.int4_mm, aten.int8_mm, aten.int_mm = int4_mm, int8_mm, int_mm
    aten.missing = lambda _name: ""
    register_for_cpu()


@lru_cache(maxsize=1)
def register_for_cpu() -> torch.library.Library:
    """Register every op of qcore-xpu for CPU tensors, too; they stay registered as long as the result is cached."""
    from qcore_xpu import ops, products, triton_ops

    library = torch.library.Library(ops.NAMESPACE, "IMPL")
    for module in (products, triton_ops):
        for name in [name for name in vars(module) if name.startswith("op_")]:
            library.impl(name.removeprefix("op_"), getattr(module, name.removeprefix("op_")), "CPU")
    return library


def int4_mm(x: Tensor, words: Tensor, group: int, scale: Tensor, zeros: Tensor) -> Tensor:
    """Weights rounded to x's dtype, sums in float32."""
    record("int4_mm", group, x=x, words=words, scale=scale, zeros=zeros)
    check_int4(x, words, group, scale, zeros)
    dense = dense_int4(words, group, scale, zeros).to(x.dtype)
    return (x.float() @ dense.float().t()).to(x.dtype)


def dense_int4(words: Tensor, group: int, scale: Tensor, zeros: Tensor) -> Tensor:
    """The weight that words stand for, float64 ``(N, K)``: column 8j + i is bits 4i to 4i + 3 of word j."""
    shifts = torch.arange(8, device=words.device) * 4
    codes = (words.to(torch.int64).unsqueeze(-1) >> shifts) & 15
    codes = codes.reshape(words.shape[0], -1)
    columns = torch.arange(codes.shape[1], device=words.device) // group
    return (codes.double() - zeros.double().t()[:, columns]) * scale.double().t()[:, columns]


def int8_mm(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Sums in float32, scaled there."""
    record("int8_mm", x=x, codes=codes, scale=scale)
    check_int8(x, codes, scale)
    return ((x.float() @ codes.float().t()) * scale).to(x.dtype)


def int_mm(x: Tensor, codes: Tensor) -> Tensor:
    """Whole numbers, that leave through float32: 24 significant bits."""
    record("int_mm", x=x, codes=codes)
    check_int(x, codes)
    return (x.double() @ codes.double()).float().clamp(-(2.0**31), 2.0**31 - 128).to(torch.int32)
