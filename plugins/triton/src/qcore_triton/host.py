"""The host side of these kernels: memory, launch arguments and grids for any plugin.

A plugin passes its own functions and sizes: ``launch(kernel, grid, *arguments, **meta)``, ``empty(shape, dtype,
device)``, block sizes, and as ``options`` the constexpr PDL and Triton's launch options. Importing this
module imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .codes import SYMMETRIC, TENSOR, TOKEN, Codes, Given, Mode, columns_of_codes, flat
from .geometry import Geometry, power_of_two
from .kernels import channels_last as images
from .kernels import conv, dequant, gather, quantize, several
from .packing import block_size
from .weights import INT_ZERO, ROWS, Weight, pitch_of

Launch = Callable[..., object]
Empty = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]

_EXACT_K = {False: 1 << 16, True: 1 << 15}
"""Up to this K the products of one group fit int32; True: if factors are differences of int8 codes and zero points."""
_EARLY = 32
"""Up to this many rows, a product starts to read weights while the rows are quantized, if kernels may overlap."""
CODE_ROWS = 128
"""Memory for codes has a multiple of so many rows: kernels may read whole tiles of it, whatever is there."""
_UNSCALED = 1 << 24
"""Steps per group if there is one group: more than any K has."""


def channels_last(launch: Launch, x: Tensor, **options: Any) -> Tensor:
    """Images x ``(B, C, H, W)`` with their channels last in memory; x itself if it has them there."""
    batch, channels, height, width = x.shape
    if x.stride(1) == 1 or channels == 1 or not x.numel():
        return x
    y = x.new_empty((batch, height, width, channels))
    bc = min(64, power_of_two(channels))
    bp = min(1024, 4096 // bc)
    tiles = -(-height * width // bp)
    meta = {"FLAT": height == 1 or x.stride(2) == width * x.stride(3), "BP": bp, "BC": bc, **options}
    grid = (batch * tiles, -(-channels // bc))
    launch(images.channels_last, grid, x, y, height * width, channels, width, tiles, *x.stride(), **meta)
    return y.movedim(-1, 1)


def quantize_rows(
    launch: Launch, empty: Empty, x: Tensor, mode: Mode, *, total: bool, order: int, block: int, rows: int = 0,
    dtype: torch.dtype = torch.int8, **options: Any,
) -> Codes:  # fmt: skip
    """Quantize x ``(M, K)`` of any strides; an int8 x already holds codes.

    ``total``: also sum the codes; ``order``: `Weight.order` of the weight that they multiply; ``block``: columns that
    a program holds at a time, a power of two, at least 128; ``rows``: rows that it holds, a power of two, if ``block``
    holds whole rows. 0 selects the kernel with one row of any length per program. ``dtype``: of the tensor of codes; in
    a float one, for that kernel, they are less their zero points, and have none.
    """
    assert dtype == torch.int8 or not (rows or total)
    (m, k), (kind, scale, zero) = x.shape, mode
    q, s, z, t = _room(empty, m, k, kind, total, x.device, dtype)
    if m:
        number, token = kind == TENSOR, kind == TOKEN
        given = (scale if token else s, zero if token else s, scale if number else 0.0, zero if number else 0.0)
        sizes = (k, x.stride(0) if m > 1 else 0, x.stride(1) if k > 1 else 1)
        meta = {"MODE": kind, "CODES": x.dtype == torch.int8, "TOTAL": total, "ORDER": order, "BLOCK": block, **options}
        room = (x, q, s, s if z is None else z, s if t is None else t)
        if rows:
            launch(several.quantize_rows, (-(-m // rows),), *room, *given, m, *sizes, BM=rows, **meta)
        else:
            late, loop = m > _EARLY, columns_of_codes(k) > block
            launch(quantize.quantize_rows, (m,), *room, *given, *sizes, LOOP=loop, LATE=late, **meta)
    return Codes(q, s, z if mode.has_zero and dtype == torch.int8 else None, t, order)


def _room(
    empty: Empty, m: int, k: int, kind: int, total: bool, device: torch.device, dtype: torch.dtype = torch.int8
) -> Any:
    """Uninitialized codes, scale, zero and total; codes of more than a few rows have room for `CODE_ROWS`."""
    rows = -(-m // CODE_ROWS) * CODE_ROWS if m > 8 else m
    q = empty((rows, columns_of_codes(k)), dtype, device)[:m]
    s = empty((m,), torch.float32, device)
    z = empty((m,), torch.float32, device) if kind != SYMMETRIC else None
    return q, s, z, empty((m,), torch.int32, device) if total else None


def quantize_columns(
    launch: Launch, empty: Empty, x: Tensor, geometry: Geometry, mode: Mode, first: int, count: int, weight: Weight,
    *, columns: int = 0, **options: Any,
) -> Codes:  # fmt: skip
    """Codes of ``count`` columns of x ``(B, C, H, W)`` from position ``first`` on, as in `quantize_rows`.

    One channel group; scale and zero point are numbers if given. ``columns``: columns per program, a power of two; 0
    selects the kernel with one column per program.
    """
    (_, channels, height, width), (kind, scale, zero) = x.shape, mode
    taps, total = geometry.kernel[0] * geometry.kernel[1], totals_needed(weight)
    q, s, z, t = _room(empty, count, weight.k, kind, total, x.device)
    room = (x, q, s, s if z is None else z, s if t is None else t)
    given = (1.0 if scale is None else scale, 0.0 if zero is None else zero, first)
    window = (*geometry.output(height, width), *geometry.stride, *geometry.padding, *geometry.dilation)
    sizes = (channels, height, width, *window, geometry.kernel[1], taps, *x.stride())
    meta = {"MODE": kind, "CODES": x.dtype == torch.int8, "TOTAL": total, "ORDER": weight.order, **options}
    meta |= {"TAPS": power_of_two(taps), "BC": power_of_two(channels)}
    if columns:
        launch(several.quantize_columns, (-(-count // columns),), *room, *given, count, *sizes, BM=columns, **meta)
    else:
        launch(conv.quantize_columns, (count,), *room, *given, *sizes, **meta)
    # In the weight's own order: a product that needs another order (32, for blocks of 128) cannot use them.
    return Codes(q, s, z if mode.has_zero else None, t, weight.order)


def totals_needed(weight: Weight) -> bool:
    """Whether `x_sums` needs sums of whole rows of codes, which quantization computes along the way."""
    return weight.zero is not None and weight.scale.shape[0] == 1


class Blocking(NamedTuple):
    """**Fields:** ``p``: columns per step along K; ``grouped``: whether groups are scaled; ``per``: steps per group."""

    p: int
    grouped: bool
    per: int


def blocking(weight: Weight) -> Blocking:
    """The steps of int8 products along K."""
    groups = weight.scale.shape[0]
    p = weight.order or 128
    if groups > 1:
        p = p if weight.bits == 4 else next(size for size in (128, 64, 32) if weight.group % size == 0)
        return Blocking(p, True, weight.group // p)
    return Blocking(p, weight.k > _EXACT_K[weight.bits == 8 and weight.zero_kind == INT_ZERO], _UNSCALED)


def steps(weight: Weight, p: int) -> tuple[int, int]:
    """Steps along K, and the row pitch of an int8 weight in units of 32."""
    if weight.bits == 4:
        return weight.data.shape[1], 0
    return -(-weight.k // p), weight.data.shape[1] // 32


class End(NamedTuple):
    """Arguments of a product's epilogue: tensors, numbers and constexprs."""

    args: tuple[Any, ...]
    numbers: tuple[float, float]
    meta: dict[str, Any]


def end_of(bias: Tensor | None, out: Given | None, y: Tensor) -> End:
    """Arguments of the epilogue, which quantizes with ``out`` if given; y is a placeholder for absent tensors."""
    meta = {"HAS_BIAS": bias is not None, "OUT": 0}
    args: tuple[Any, ...] = (y if bias is None else bias, y, y)
    if out is None:
        return End(args, (1.0, 0.0), meta)
    if isinstance(out.scale, Tensor):
        args = (args[0], flat(out.scale), flat(torch.as_tensor(out.zero, device=y.device)))
        return End(args, (1.0, 0.0), {**meta, "OUT": 2})
    return End(args, (float(out.scale), float(out.zero)), {**meta, "OUT": 1})


def operands(codes: Codes, weight: Weight, sums: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Parameters of x and w: scale, zero of x; scale, zero, sums of w."""
    x_zero = codes.scale if codes.zero is None else codes.zero
    w_zero = weight.scale if weight.zero is None else weight.zero
    return (codes.scale, x_zero), (weight.scale, w_zero, codes.scale if sums is None else sums)


def x_sums(
    launch: Launch, empty: Empty, codes: Codes, zero_kind: int, grouped: bool, p: int, blocks: int, **options: Any
) -> Tensor:
    """int32 ``(blocks, M)``, or ``(1, M)`` per channel: sums of x that zero points of the weight multiply."""
    if not zero_kind:
        return codes.scale
    if grouped:
        return _block_sums(launch, empty, codes.q, p, blocks, **options)
    if codes.total is not None:
        return codes.total
    return _block_sums(launch, empty, codes.q, 128, codes.q.shape[1] // 128, **options).sum(0, dtype=torch.int32)


def _block_sums(launch: Launch, empty: Empty, q: Tensor, p: int, blocks: int, **options: Any) -> Tensor:
    m, wide = q.shape
    sums = empty((blocks, m), torch.int32, q.device)
    launch(quantize.group_sums, (-(-m // 32), blocks), q, sums, m, wide, B=p, BM=32, **options)
    return sums


def dense(
    launch: Launch, empty: Empty, weight: Weight, dtype: torch.dtype, *, scaled: bool = True, multiple: int = 1,
    **options: Any,
) -> Tensor:  # fmt: skip
    """The dequantized weight ``(N, K)``, or its elements without scales: computed in float32, rounded once.

    ``multiple``: N and K are rounded up to it, at most 8; values beyond them are unspecified.
    """
    n, k = (-(-size // multiple) * multiple for size in (weight.n, weight.k))
    out = empty((n, k), dtype, weight.data.device)
    block = weight.block
    stored = weight.data.shape[1] if weight.bits == 4 else weight.data.shape[1] // block
    blocks = -(-weight.k // block)
    launch(
        dequant.dequantize, (-(-weight.n // ROWS), blocks), weight.data, weight.scale,
        weight.scale if weight.zero is None else weight.zero, _factor(weight), out, n, k, stored,
        weight.group if weight.scale.shape[0] > 1 else blocks * block,
        BITS=weight.bits, P=block, ZERO=weight.zero_kind, SCALED=scaled, BN=ROWS, **_decoding(weight), **options,
    )  # fmt: skip
    return out


def _factor(weight: Weight) -> Tensor:
    """The factor of a weight, or what stands in for it."""
    return weight.scale if weight.factor is None else weight.factor


def _decoding(weight: Weight) -> dict[str, Any]:
    """Constexprs that say what codes and scales stand for."""
    halves = weight.scale.shape[0] > 1 and weight.group < weight.block
    return {"ELEMENT": weight.element, "FACTOR": weight.factor is not None, "HALVES": halves}


def table_rows(
    launch: Launch, indices: Tensor, weight: Weight, dtype: torch.dtype, columns: int, *, pieces: bool, **options: Any
) -> Tensor:
    """Rows of a table ``(n, k)``: integer indices ``(T,)``, contiguous, to ``(T, k)`` of ``dtype``.

    Computed in float32 and rounded once. ``columns``: the most columns per program, of one row or, with ``pieces``, of
    several short rows.
    """
    tokens, d = indices.shape[0], weight.k
    out = torch.empty((tokens, d), dtype=dtype, device=indices.device)
    if not tokens:
        return out
    block = weight.order or block_size(weight.group if weight.group < d else None)
    blocks = -(-d // block)
    table = (weight.data, weight.scale, weight.scale if weight.zero is None else weight.zero, _factor(weight))
    sizes = (weight.n, d, weight.group, blocks, weight.data.stride(0))
    meta = {"BITS": weight.bits, "P": block, "ZERO": weight.zero_kind, **_decoding(weight), **options}
    if pieces:
        together = min(power_of_two(tokens * blocks), columns // block)
        grid = (-(-tokens * blocks // together),)
        launch(gather.gather_pieces, grid, indices, *table, out, *sizes, tokens * blocks, NB=together, **meta)
    else:
        together = min(power_of_two(blocks), columns // block)
        launch(gather.gather, (tokens, -(-blocks // together)), indices, *table, out, *sizes, NB=together, **meta)
    return out


def part_of(weight: Weight, first: int, count: int) -> Weight:
    """``count`` rows of a weight; ``first`` is a multiple of 16."""
    unit = ROWS if weight.bits == 4 else 1
    data = weight.data[first // unit : -(-(first + count) // ROWS) * ROWS // unit]
    zero = None if weight.zero is None else parameters_of(weight.zero, first, count)
    return weight._replace(data=data, scale=parameters_of(weight.scale, first, count), zero=zero, n=count)


def parameters_of(parameter: Tensor, first: int, count: int) -> Tensor:
    """The columns that belong to some rows of the weight, and as many behind them as `pitch_of` says."""
    return pad(parameter[:, first : first + count], (0, pitch_of(count) - count)).contiguous()


def by_channel_groups(
    convolve: Callable[[Tensor, Weight, Tensor | None, Tensor | None, Geometry], Tensor],
    x: Tensor, weight: Weight, sums: Tensor | None, bias: Tensor | None, geometry: Geometry,
) -> Tensor:  # fmt: skip
    """``convolve`` for each channel group of x ``(B, C, H, W)`` separately: rows ``(B * OH * OW, OC)``."""
    groups = geometry.groups
    n, one = weight.n // groups, geometry._replace(groups=1)
    parts = [
        convolve(
            image,
            part_of(weight, i * n, n),
            None if sums is None else parameters_of(sums, i * n, n),
            None if bias is None else bias[i * n : (i + 1) * n].contiguous(),
            one,
        )
        for i, image in enumerate(x.chunk(groups, dim=1))
    ]
    return torch.cat(parts, dim=1)
