"""``torch.ops.qcore_cpu.*``: the ops that the library registers, and their fake implementations for torch.compile.

Import it only after `native.fault` has reported no problem: registering fakes needs the ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .geometry import Geometry

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""The library's numbering of dtypes."""
_DTYPES = list(TYPES)
FLOAT_TYPES = {dtype: number for dtype, number in TYPES.items() if dtype.is_floating_point}
SCALE_TYPES = {**FLOAT_TYPES, torch.uint8: 4}
"""The same for what a bias or scales may have; uint8 holds exponents (e8m0)."""

linear = torch.ops.qcore_cpu.linear.default
grouped_linear = torch.ops.qcore_cpu.grouped_linear.default
conv2d = torch.ops.qcore_cpu.conv2d.default
conv2d_planes = torch.ops.qcore_cpu.conv2d_planes.default
conv2d_channels = torch.ops.qcore_cpu.conv2d_channels.default
embedding = torch.ops.qcore_cpu.embedding.default
pack = torch.ops.qcore_cpu.pack.default
unpack = torch.ops.qcore_cpu.unpack.default
transposed = torch.ops.qcore_cpu.transposed.default


def _linear(x: Tensor, *rest: Any) -> Tensor:
    n, result = rest[12], rest[-1]
    return x.new_empty((x.shape[0], n), dtype=_DTYPES[result])


def _grouped_linear(x: Tensor, *rest: Any) -> Tensor:
    n, result = rest[9], rest[-1]
    return x.new_empty((x.shape[0], n), dtype=_DTYPES[result])


def _conv2d(x: Tensor, *rest: Any) -> Tensor:
    batch, height, width, _ = x.shape
    return x.new_empty((batch, *_output_size(height, width, rest), rest[9]), dtype=_DTYPES[rest[19]])


def _conv2d_planes(x: Tensor, *rest: Any) -> Tensor:
    batch, _, height, width = x.shape
    return x.new_empty((batch, rest[9], *_output_size(height, width, rest)), dtype=_DTYPES[rest[19]])


def _output_size(height: int, width: int, rest: tuple[Any, ...]) -> tuple[int, int]:
    kh, kw, sh, sw, ph, pw, dh, dw = rest[20:28]
    return (height + 2 * ph - dh * (kh - 1) - 1) // sh + 1, (width + 2 * pw - dw * (kw - 1) - 1) // sw + 1


def _embedding(indices: Tensor, codes: Tensor, *rest: Any) -> Tensor:
    k, result = rest[6], rest[-1]
    return codes.new_empty((*indices.shape, k), dtype=_DTYPES[result])


def _pack(codes: Tensor, group: int, bits: int, offset: int) -> Tensor:
    del offset
    n, k = codes.shape
    return codes.new_empty((-(-n // 32), Geometry.of(k, group).packed * bits // 32, 128), dtype=torch.uint8)


def _unpack(packed: Tensor, n: int, k: int, group: int, bits: int, offset: int) -> Tensor:
    del group, bits, offset
    return packed.new_empty((n, k))


def _transposed(x: Tensor) -> Tensor:
    batch, rows, columns = x.shape
    return x.new_empty((batch, columns, rows))


_FAKES: dict[str, Callable[..., Tensor]] = {
    "linear": _linear,
    "grouped_linear": _grouped_linear,
    "conv2d": _conv2d,
    "conv2d_planes": _conv2d_planes,
    "conv2d_channels": _conv2d,
    "embedding": _embedding,
    "pack": _pack,
    "unpack": _unpack,
    "transposed": _transposed,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"qcore_cpu::{_name}", _fake)
