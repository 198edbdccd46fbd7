"""Products for many rows on Hopper, from torch tensors to the kernels ``mixed`` and ``fours``, written in Gluon."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qcore_triton.weights import FLOAT_ZERO, Weight

from .counters import counters
from .device import Device
from .hopper import usable
from .launch import launch, options
from .replay import empty, provided

if TYPE_CHECKING:
    from .dispatch import Config, Problem


def serves(device: Device, problem: Problem) -> bool:
    """Whether ``mixed`` computes a product.

    Sizes: what descriptors need. A scale comes before the product, rounded with the weight, or after all of K.
    """
    if device.arch != 90 or not usable() or not problem.narrow or problem.n % 16:
        return False
    if problem.bits == 4:
        return problem.block == 128 and (problem.whole or not problem.exact)
    return problem.whole


def mixed(x: Tensor, weight: Weight, bias: Tensor | None, device: Device, config: Config) -> Tensor:
    """``x @ W^T + bias`` in x's dtype, by tiles of ``config.bm`` tokens, or of fewer where fewer hold them all.

    X has rows on 16 bytes, and as many columns as the packed weight.
    """
    from .kernels.mixed import ROWS, mixed

    data, scale, zero = weight.data, weight.scale, weight.zero
    (m, columns), n, rows = x.shape, weight.n, ROWS.value
    bm = next(size for size in (64, 128, config.bm) if size >= min(m, config.bm))
    blocks = -(-columns // 128)
    scaled = scale.shape[0] > 1 or weight.zero_kind == FLOAT_ZERO
    pieces = 2 if bm > 128 else 1  # whole tiles of results would take the place of a stage
    y = empty((m, n), x.dtype, x.device)
    w = _words(data) if weight.bits == 4 else _descriptor(data.view(torch.int16), (rows, 32))
    tiles = -(-n // (2 * rows)) * -(-m // bm)
    _, (waves, share, programs) = shares(tiles, blocks, bm, device)
    left = tiles - waves * programs if share else 0
    parts = empty(((programs + left) * 2 * rows * bm,), torch.float32, x.device) if left else y
    launch(
        mixed, (programs,), _descriptor(x, (bm, 64)), w,
        _descriptor(scale, (1, 2 * rows), swizzled=False) if scaled else scale,
        scale if zero is None else _descriptor(zero, (1, 2 * rows), swizzled=False),
        scale if bias is None else bias, _descriptor(y, (bm // pieces, rows)), parts,
        provided(counters, 2 * left, x.device) if left else y,
        m, n, blocks, weight.group // 128 if scale.shape[0] > 1 else blocks, waves, share,
        BITS=weight.bits, BM=bm, STAGES=_STAGES[weight.bits, bm], GROUP=2048 // bm, SCALED=scaled,
        ZERO=weight.zero_kind, BIAS=bias is not None, PIECES=pieces, U=1 if bm > 128 else 2, SPREAD=left > 0,
        **options(device, 4),
    )  # fmt: skip
    return y


def spread(tiles: int, steps: int, config: Config, device: Device) -> tuple[int, int, int]:
    """How `gemm` spreads ``tiles`` of so many steps of K: whole tiles of a program, its share of the rest, programs."""
    if not config.even:
        if config.split == 1:
            return 1, 0, tiles
        share = -(-steps // config.split)
        return 0, share, -(-tiles * steps // share)
    programs = config.even * device.sms
    waves, left = divmod(tiles, programs)
    share = -(-left * steps // programs)
    return waves, share, programs if waves else -(-tiles * steps // share)


@lru_cache(maxsize=8192)
def shares(tiles: int, blocks: int, bm: int, device: Device) -> tuple[float, tuple[int, int, int]]:
    """The time that `mixed` takes for ``tiles`` of so many blocks of K, and how it spreads them, as `spread` says.

    Tiles that make no whole wave stay so, or K is split, or they are spread evenly: parts of sums cost time, too.
    """
    waves, left = divmod(tiles, device.sms)
    programs = device.sms if waves else tiles
    ways = [(float(waves + (left > 0)), 0.0, (waves + (left > 0), 0, programs))]
    for split in (2, 4, 8):
        if left and left * split <= device.sms and blocks >= 4 * split:
            share = -(-blocks // split)
            programs = device.sms if waves else -(-left * blocks // share)
            ways.append((waves + 1 / split, 0.12, (waves, share, programs)))
    if waves and left and blocks >= 8:
        ways.append((tiles / device.sms, 0.4, (waves, -(-left * blocks // device.sms), device.sms)))
    return min((rounds * blocks * MIXED[bm] + sharing * bm, way) for rounds, sharing, way in ways)


MIXED = {256: 10.0, 128: 5.6, 64: 3.8}
"""Tokens of a tile: the time that a block of 128 columns takes. This and what parts cost: as measured on an H200."""

_STAGES = {(4, 256): 5, (4, 128): 8, (4, 64): 8, (8, 256): 4, (8, 128): 8, (8, 64): 8}
"""How many stages shared memory holds, by bits and tokens of a tile."""

FOURS_ORDER = 32
"""The order of columns, see `Weight.order`, of codes that meet int4 in `fours`."""


def serves_fours(device: Device, n: int, inner: int) -> bool:
    """Whether `fours` serves int4 weights of n rows, in blocks of ``inner`` columns."""
    return device.arch == 90 and inner == 128 and n % 16 == 0 and usable()


def computes_fours(weight: Weight, out_dtype: torch.dtype, out_scale: Any) -> bool:
    """Whether `fours` computes it: no float zero points, results of one or two bytes, not scaled by tokens."""
    plain = weight.bits == 4 and weight.zero_kind != FLOAT_ZERO
    return plain and out_dtype.itemsize <= 2 and not isinstance(out_scale, Tensor)


def fours(r: Any) -> None:
    """Launch for an `int8._Product`."""
    from .kernels.fours import fours

    assert r.codes.order == FOURS_ORDER, "codes were quantized for another kernel"
    (m, _), weight, c, each, moved = r.codes.q.shape, r.weight, r.config, r.form["GROUPED"], r.form["XZERO"]
    (x_scale, x_zero), (scale, zero, sums) = r.of_x, r.of_w
    # Zero points and quantized results take the registers of a second block's sums.
    plain = not moved and weight.zero is None and r.form["OUT"] == 0

    def by_row(tensor: Tensor, described: bool) -> Any:
        return _descriptor(tensor, (1, 128), swizzled=False) if described else tensor

    launch(
        fours, (min(r.tiles, r.device.sms),), _descriptor(r.codes.q, (c.bm, 128)), x_scale, x_zero, _words(weight.data),
        by_row(scale, each), by_row(zero, weight.zero is not None), by_row(sums, each and moved), r.end.args[0], r.y,
        _descriptor(r.y, (c.bm, 64)), *r.end.numbers, m, weight.n, r.blocks, r.form["PER"],
        BM=c.bm, STAGES=6 if c.bm > 64 else 8, GROUP=2048 // c.bm, EACH=each, ZERO=weight.zero is not None, MOVED=moved,
        HAS_BIAS=r.form["HAS_BIAS"], OUT=r.form["OUT"], U={128: 2 if plain else 1, 64: 4, 32: 1}[c.bm],
        **options(r.device, 4),
    )  # fmt: skip


def _words(data: Tensor) -> Any:
    """Int4 words by 64 rows and 128 columns."""
    return _descriptor(data.view(torch.int32).view(data.shape[0], -1), (4, 256), swizzled=False)


def _descriptor(tensor: Tensor, block: tuple[int, int], *, swizzled: bool = True) -> Any:
    """What Triton makes a descriptor of blocks of a matrix of."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if tensor.data_ptr() % 16:
        tensor = tensor.clone()
    size, (rows, columns) = tensor.element_size(), tensor.shape
    layout = NVMMASharedLayout(min(128, block[1] * size) if swizzled else 0, 8 * size, 2)
    pitch = tensor.stride(0) if rows > 1 else columns  # the stride of a single row may be anything
    return TensorDescriptor(tensor, [rows, columns], [pitch, 1], list(block), layout)
