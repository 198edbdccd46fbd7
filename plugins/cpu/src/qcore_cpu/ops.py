"""``torch.ops.qcore_cpu.*``: what the library registers, and how their results look to torch's compiler.

Import it after `native.fault` found nothing: registering fakes needs the ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""The library's numbers of dtypes."""
_DTYPES = list(TYPES)

linear = torch.ops.qcore_cpu.linear.default
grouped_linear = torch.ops.qcore_cpu.grouped_linear.default
conv2d = torch.ops.qcore_cpu.conv2d.default
embedding = torch.ops.qcore_cpu.embedding.default
pack = torch.ops.qcore_cpu.pack.default
unpack = torch.ops.qcore_cpu.unpack.default


@torch.library.register_fake("qcore_cpu::linear")
def _linear(x: Tensor, *rest: object) -> Tensor:
    n, result = rest[12], rest[-1]
    return x.new_empty((x.shape[0], n), dtype=_DTYPES[result])  # type: ignore[call-overload, index, no-any-return]


@torch.library.register_fake("qcore_cpu::grouped_linear")
def _grouped_linear(x: Tensor, *rest: object) -> Tensor:
    n, result = rest[9], rest[-1]
    return x.new_empty((x.shape[0], n), dtype=_DTYPES[result])  # type: ignore[call-overload, index, no-any-return]


@torch.library.register_fake("qcore_cpu::conv2d")
def _conv2d(x: Tensor, *rest: object) -> Tensor:
    n, result = rest[9], rest[19]
    kh, kw, sh, sw, ph, pw, dh, dw = rest[20:28]
    batch, height, width, _ = x.shape
    oh = (height + 2 * ph - dh * (kh - 1) - 1) // sh + 1  # type: ignore[operator]
    ow = (width + 2 * pw - dw * (kw - 1) - 1) // sw + 1  # type: ignore[operator]
    return x.new_empty((batch, oh, ow, n), dtype=_DTYPES[result])  # type: ignore[call-overload, index, no-any-return]


@torch.library.register_fake("qcore_cpu::embedding")
def _embedding(indices: Tensor, codes: Tensor, *rest: object) -> Tensor:
    k, result = rest[6], rest[-1]
    return codes.new_empty((indices.numel(), k), dtype=_DTYPES[result])  # type: ignore[call-overload, index, no-any-return]


@torch.library.register_fake("qcore_cpu::pack")
def _pack(codes: Tensor, group: int, bits: int, offset: int) -> Tensor:
    del offset
    from .layout import Geometry

    n, k = codes.shape
    return codes.new_empty((-(-n // 32), Geometry.of(k, group).packed * bits // 32, 128), dtype=torch.uint8)


@torch.library.register_fake("qcore_cpu::unpack")
def _unpack(packed: Tensor, n: int, k: int, group: int, bits: int, offset: int) -> Tensor:
    del group, bits, offset
    return packed.new_empty((n, k))
