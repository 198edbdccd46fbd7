"""Scaled dot product attention with grouped heads, in one pass over keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from qcore.plugin_api import PluginError

from ..builder import Builder, Ref, fold
from ..device import Device
from .operand import Operand, new
from .pointwise import convert
from .prepare import LANES
from .walks import required_subgroup

_WIDEST = 256
"""Columns of queries, keys and values that the shader has room for."""
_CORES = 32
"""Assumed if the driver does not report a number."""
_LOG2_E = math.log2(math.e)
_MASKS = {torch.float32: 1, torch.bool: 2}


@dataclass(frozen=True)
class _Shape:
    """Of a workgroup: lanes, rows of queries, keys at a time; lanes of a team for ``each`` keys at once.

    ``values``: of how many keys a lane reads the values before it uses the first.
    """

    lanes: int
    rows: int
    keys: int
    team: int
    each: int
    values: int = 1


def attention(
    b: Builder,
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Operand | None,
    is_causal: bool,
    scale: float | None,
    out: Operand | None = None,
) -> Operand:
    """``softmax(q @ k^T * scale + mask) @ v`` as the op of `qcore.graphs.ops`; E and Ev are at most 256.

    **Arguments:** q ``(B, H, L, E)``, k ``(B, Hk, S, E)``, v ``(B, Hk, S, Ev)`` of any strides, Hk divides H; ``mask``:
    float32 or bool, broadcast to ``(B, H, L, S)``; ``scale``: by default ``1 / sqrt(E)``.
    **Returns:** ``(B, H, L, Ev)``, by default a view of contiguous memory ``(B, L, H, Ev)``; 0 where no key takes part.
    """
    batch, heads, queries, columns = q.shape
    width = v.shape[3]
    _check(q, k, v)
    y = new(b, (batch, queries, heads, width), q.dtype).transpose(1, 2) if out is None else out
    if y.numel == 0 or k.shape[2] == 0:
        raise ValueError("attention over no queries or no keys has no step")
    q, k, v = (x if x.strides[3] == 1 or x.shape[3] == 1 else convert(b, x, x.dtype) for x in (q, k, v))
    y_memory = y if y.strides[3] == 1 else new(b, y.shape, y.dtype)
    scale = 1 / math.sqrt(columns) if scale is None else scale
    _launch(b, q, k, v, mask, is_causal, scale, y_memory)
    return y if y_memory is y else convert(b, y_memory, y.dtype, y)


def _check(q: Operand, k: Operand, v: Operand) -> None:
    heads, key_heads = q.shape[1], k.shape[1]
    if heads % key_heads:
        raise ValueError(f"{heads} heads of queries and {key_heads} of keys: the second must divide the first")
    if max(q.shape[3], v.shape[3]) > _WIDEST:
        raise ValueError(f"heads of {q.shape[3]} and {v.shape[3]} columns: attention on Vulkan takes up to {_WIDEST}")


def _launch(
    b: Builder,
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Operand | None,
    is_causal: bool,
    scale: float,
    y: Operand,
) -> None:
    batch, heads, queries, columns = q.shape
    key_heads, keys, width = k.shape[1], k.shape[2], v.shape[3]
    shared_by, rows = heads // key_heads, heads // key_heads * queries
    fours = (-(-columns // 4), -(-width // 4))
    shape = _shape(b.device, rows, fours)
    tiles, pairs = -(-rows // shape.rows), key_heads * batch
    split = _split(b.device, tiles * pairs, keys, shape)
    splits = -(-keys // split)
    aligned = columns % 4 == 0 and width % 4 == 0 and all(map(_is_aligned, (q, k, v, y)))
    view = None if mask is None else mask.broadcast_to((batch, heads, queries, keys))
    push: list[int | float] = [rows, queries, keys, shared_by, key_heads, columns, width, split]
    for x in (q, k, v, y):
        push += x.strides[:3]
    push += [*((0,) * 4 if view is None else view.strides), q.offset, k.offset, v.offset]
    push += [0 if view is None else view.offset, y.offset]
    kind, subgroup = 0 if view is None else _MASKS[view.dtype], b.device.description.subgroup
    constants = (
        shape.lanes, shape.rows, shape.keys, shape.team, *fours, int(aligned), kind, int(is_causal), int(splits > 1),
        shape.each, int(shape.lanes == shape.rows == subgroup.size), int(shape.lanes == subgroup.size),
        shape.values,
    )  # fmt: skip
    sums = b.scratch(16 * splits * pairs * rows * fours[1]) if splits > 1 else y.ref
    totals = b.scratch(8 * splits * pairs * rows) if splits > 1 else y.ref
    refs: list[Ref | None] = [q.ref, k.ref, v.ref, q.ref if view is None else view.ref, None, None, totals, sums]
    push.append(scale * _LOG2_E)
    groups, size = (tiles, pairs, splits), required_subgroup(b.device)
    if splits > 1 and tiles == 1:
        refs[4:6] = [b.zeros(4 * pairs), y.ref]
        b.dispatch("attention_joined", constants, groups, push, refs, subgroup=size)
        return
    b.dispatch("attention", constants, groups, push, refs, subgroup=size)
    if splits > 1:
        lanes = pairs * rows * fours[1]
        words = [pairs * rows, splits, fours[1], width, rows, shared_by, key_heads, *y.strides[:3], y.offset]
        groups = fold(-(-lanes // LANES))
        b.dispatch("attention_join", (LANES,), groups, words, [sums, totals, *[None] * 5, y.ref])


def _shape(device: Device, rows: int, fours: tuple[int, int]) -> _Shape:
    """For few rows, as of one token, or for many; the first that the device's shared memory holds."""
    team = min(8, device.description.subgroup.size)
    few = 4 if rows <= 4 else 8
    if device.profile == "cpu":
        shapes = [_Shape(8, few, 32, 1, 4)]
    elif rows <= 8:
        shapes = [_Shape(128, few, 64, team, 2, 4), _Shape(128, 4, 32, team, 1, 4)]
    else:
        shapes = [_Shape(128, 16, 128, 2, 2), _Shape(128, 8, 64, 2, 1), _Shape(128, 4, 64, 2, 1)]
    most = device.description.limits.shared_memory
    found = next((shape for shape in shapes if _shared_bytes(shape, fours) <= most), None)
    if found is None:
        raise PluginError(f"attention over heads of {4 * fours[0]} columns needs more shared memory than {most} bytes")
    return found


def _shared_bytes(shape: _Shape, fours: tuple[int, int]) -> int:
    """Queries, weights, and the sums of groups of lanes; a few words for each row."""
    width = min(shape.lanes, fours[1])
    sums = shape.lanes // width * -(-fours[1] // width) * width
    return 16 * (shape.rows * fours[0] + shape.keys * (shape.rows // 4 + 1) + sums) + 20 * shape.rows


def _split(device: Device, workgroups: int, keys: int, shape: _Shape) -> int:
    """Keys of a workgroup: all, or fewer if the workgroups would not fill the cores twice."""
    if device.profile == "cpu":
        return -(-keys // shape.keys) * shape.keys
    wanted = max(1, 2 * (device.description.limits.cores or _CORES) // workgroups)
    return -(-keys // (shape.keys * wanted)) * shape.keys


def _is_aligned(x: Operand) -> bool:
    return x.offset % 4 == 0 and all(stride % 4 == 0 for stride in x.strides[:3])
