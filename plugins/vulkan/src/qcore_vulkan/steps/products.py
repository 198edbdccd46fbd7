"""Products of float matrices of any strides: layers with float weights, and batches of matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..builder import Builder, Ref, fold
from ..device import Device
from .experts import Ends, row_tiles
from .operand import HALVES, Operand, merge, over, result
from .pointwise import convert
from .walks import required_subgroup

_FEW = 8
"""Rows up to which a product is bound by reading the weight."""
_CORES = 32
"""Assumed if the driver does not report a number."""
_TILES = ((128, 128, 8, 8), (64, 64, 4, 4), (32, 32, 4, 4))
"""Of `product_shared`: results of a workgroup, and of a lane."""


def dense(b: Builder, x: Operand, weight: Operand, bias: Operand | None, out: Operand | None = None) -> Operand:
    """``x @ weight^T + bias``, x ``(..., K)``, weight ``(N, K)`` float32, float16 or bfloat16, bias float32 ``(N,)``.

    A weight too large for a binding must be contiguous.
    """
    y = result(b, (*x.shape[:-1], weight.shape[0]), x.dtype, out)
    if y.numel == 0:
        return y
    rows, results = _matrix(x), _matrix(y)
    if rows is None:
        rows = _matrix(convert(b, x, x.dtype))
    if results is None:
        raise ValueError(f"rows of shape {y.shape} with strides {y.strides} are no matrix: pass contiguous memory")
    assert rows is not None
    for part, first in _parts(b.device, weight):
        _append(b, rows, part, bias, results.slice(1, first, part.shape[0]), first)
    return y


def matmul(b: Builder, a: Operand, y: Operand, out: Operand | None = None) -> Operand:
    """``a @ y``, a ``(..., M, K)`` and y ``(..., K, N)``, whose outer dimensions are broadcast."""
    outer = tuple(torch.broadcast_shapes(a.shape[:-2], y.shape[:-2]))  # type: ignore[no-untyped-call]
    z = result(b, (*outer, a.shape[-2], y.shape[-1]), a.dtype, out)
    if z.numel == 0:
        return z
    if a.shape[-1] == 0:
        raise ValueError("a product over no elements has no step")
    left, right = a.broadcast_to((*outer, *a.shape[-2:])), y.broadcast_to((*outer, *y.shape[-2:]))
    if len(merge(outer, *(x.strides[:-2] for x in (z, left, right)))[0]) > 2:
        left, right = convert(b, left, a.dtype), convert(b, right, a.dtype)
    _append(b, left, right.transpose(len(outer), len(outer) + 1), None, z, 0)
    return z


def grouped(b: Builder, x: Operand, weight: Operand, ends: Ends) -> Operand:
    """Rows of x ``(T, K)``, sorted by expert, each times the matrix of its expert, weight ``(E, K, N)``: ``(T, N)``.

    Rows behind the last end give 0. The weight is float32, float16 or bfloat16; biases of ``ends`` are not added.
    """
    (m, k), n = x.shape, weight.shape[2]
    y, w = result(b, (m, n), x.dtype, None), weight.transpose(1, 2)
    push = [m, n, k, *x.strides, *w.strides[1:], *y.strides, 1, 0, 0, w.strides[0], 0, 0, 0]
    push += [x.offset, w.offset, y.offset, 0, 0, 0, ends.experts, ends.experts, ends.row]
    variant, lanes, tm, tn = _register_tile(b.device, -(-m // ends.experts), n)
    variant = variant.replace("product_tile", "product_grouped")
    groups = (-(-n // (lanes * tn)), row_tiles(m, tm, ends), 1)
    constants = (lanes, tm, tn, int(_vectors(x)), int(_vectors(w)), HALVES.get(w.dtype, 0))
    subgroup = required_subgroup(b.device) if variant == "product_grouped_spread" else 0
    b.dispatch(variant, constants, groups, push, [x.ref, w.ref, x.ref, ends.ref, *[None] * 3, y.ref], subgroup=subgroup)
    return y


def _matrix(x: Operand) -> Operand | None:
    """The outer dimensions as one; None if their strides do not allow it."""
    rows = math.prod(x.shape[:-1])
    sizes, (strides,) = merge(x.shape[:-1], x.strides[:-1])
    if len(sizes) > 1:
        return None
    return Operand(x.ref, (rows, x.shape[-1]), (strides[0], x.strides[-1]), x.dtype, x.offset)


def _parts(device: Device, weight: Operand) -> Iterator[tuple[Operand, int]]:
    """A weight in parts that fit a binding, each with its first row."""
    most = device.description.limits.max_storage_range
    if weight.ref.bytes <= most:
        yield weight, 0
        return
    n, k = weight.shape
    if not weight.is_contiguous or weight.offset:
        raise ValueError(f"a weight of {weight.ref.bytes} bytes, and bindings hold {most}: it must be contiguous")
    rows = most // (k * weight.itemsize) // 128 * 128  # so that parts begin at aligned addresses
    for first in range(0, n, rows):
        count = min(rows, n - first)
        nbytes = (count * k * weight.itemsize + 3) // 4 * 4
        yield over(weight.ref.part(first * k * weight.itemsize, nbytes), (count, k), weight.dtype), first


@dataclass(frozen=True)
class _Kernel:
    variant: str
    constants: tuple[int, ...]
    groups: tuple[int, int, int]
    subgroup: int = 0


def _append(b: Builder, a: Operand, w: Operand, bias: Operand | None, y: Operand, first: int) -> None:
    """The result y (..., M, N) from a (..., M, K) and w (..., N, K); bias from element ``first`` on."""
    m, n = y.shape[-2:]
    sizes, batches = merge(y.shape[:-2], *(x.strides[:-2] for x in (a, w, y)))
    if len(sizes) > 2:
        raise ValueError(f"batches over {len(sizes)} dimensions that cannot be merged: copy them to contiguous memory")
    push = [m, n, a.shape[-1], *a.strides[-2:], *w.strides[-2:], *y.strides[-2:], sizes[0]]
    for strides in batches:
        push += [*strides, *[0] * (2 - len(strides))]
    push += [a.offset, w.offset, y.offset, 0 if bias is None else bias.offset + first, int(bias is not None)]
    if bias is not None and not bias.is_contiguous:
        bias = convert(b, bias, bias.dtype)
        push[-2] = first
    refs: list[Ref | None] = [a.ref, w.ref, a.ref if bias is None else bias.ref, *[None] * 4, y.ref]
    kernel = _choose(b.device, a, w, m, n, math.prod(sizes))
    b.dispatch(kernel.variant, kernel.constants, kernel.groups, push, refs, subgroup=kernel.subgroup)


def _choose(device: Device, a: Operand, w: Operand, m: int, n: int, batches: int) -> _Kernel:
    vectors = (int(_vectors(a)), int(_vectors(w)), HALVES.get(w.dtype, 0))
    limits = device.description.limits
    if device.profile == "gpu" and m <= _FEW and w.strides[-1] == 1:
        rows = next(size for size in (1, 2, 4, 8) if size >= m)
        lanes = min(128, 1 << limits.max_invocations.bit_length() - 1)
        x, folds, _ = fold(-(-n * device.description.subgroup.size // lanes))
        return _Kernel("product_rows", (lanes, rows, *vectors), (x, folds, batches), required_subgroup(device))
    if device.profile == "gpu" and limits.max_invocations >= 256:
        bm, bn, tm, tn = _tile(device, m, n, batches)
        along = (int(a.strides[-1] != 1), int(w.strides[-1] != 1))
        constants = (bm // tm * (bn // tn), bm, bn, tm, tn, *vectors, *along)
        return _Kernel("product_shared", constants, (-(-m // bm), -(-n // bn), batches))
    variant, lanes, tm, tn = _register_tile(device, m, n)
    groups = (-(-n // (lanes * tn)), -(-m // tm), batches)
    subgroup = required_subgroup(device) if variant == "product_tile_spread" else 0
    return _Kernel(variant, (lanes, tm, tn, *vectors), groups, subgroup)


def _register_tile(device: Device, m: int, n: int) -> tuple[str, int, int, int]:
    """Variant, lanes, rows and columns of a lane; on CPUs as measured on lavapipe."""
    cpu, subgroup = device.profile == "cpu", device.description.subgroup
    lanes, long = 8 if cpu else 32, cpu and bool(device.description.features.get("int64"))
    if long and m > 4 and subgroup.size == lanes and "shuffle" in subgroup.operations:
        return "product_tile_spread", lanes, lanes, 4 if n > lanes else 1
    tm, tn = (1, 4) if m == 1 else (4, 8 if n > 8 * lanes else 4)
    return "product_tile_long" if long else "product_tile", lanes, tm, tn if n > lanes else 1


def _tile(device: Device, m: int, n: int, batches: int) -> tuple[int, int, int, int]:
    """The tile whose workgroups the cores finish first."""
    cores = device.description.limits.cores or _CORES

    def time(tile: tuple[int, int, int, int]) -> float:
        bm, bn, _, _ = tile
        return -(-(-(-m // bm) * -(-n // bn) * batches) // cores) * bm * bn * (1 + 8 / bm + 8 / bn)

    return min(_TILES, key=time)


def _vectors(x: Operand) -> bool:
    """Whether fours of k are adjacent and aligned, and their number is whole."""
    whole = x.shape[-1] % 4 == 0 and x.strides[-1] == 1 and x.offset % 4 == 0
    return whole and all(
        stride % 4 == 0 or size == 1 for stride, size in zip(x.strides[:-1], x.shape[:-1], strict=True)
    )
