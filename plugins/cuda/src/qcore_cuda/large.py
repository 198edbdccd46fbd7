"""Products for many rows on Hopper, from torch tensors to the kernels ``mixed`` and ``fours``, written in Gluon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .counters import counters
from .device import Device
from .hopper import usable
from .launch import launch, options
from .replay import empty
from .weights import FLOAT_ZERO, Weight

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


def mixed(x: Tensor, weight: Weight, bias: Tensor | None, device: Device, config: Config | int) -> Tensor:
    """``x @ W^T + bias`` in x's dtype, by tiles of ``config.bm`` tokens, or of fewer where fewer hold them all.

    X has rows on 16 bytes, and as many columns as the packed weight.
    """
    from .kernels.mixed import ROWS, mixed

    if isinstance(config, int):
        from .dispatch import Config

        config = Config("mixed", bm=config)
    data, scale, zero = weight.data, weight.scale, weight.zero
    (m, columns), n, rows = x.shape, weight.n, ROWS.value
    bm = next(size for size in (64, 128, config.bm) if size >= min(m, config.bm))
    blocks = -(-columns // 128)
    scaled = scale.shape[0] > 1 or weight.zero_kind == FLOAT_ZERO
    pieces = 2 if bm > 128 else 1  # whole tiles of results would take the place of a stage
    y = empty((m, n), x.dtype, x.device)
    w = _words(data) if weight.bits == 4 else _descriptor(data.view(torch.int16), (rows, 32))
    tiles = -(-n // (2 * rows)) * -(-m // bm)
    waves, share, programs = _waves(tiles, blocks, config, device)
    left = tiles - waves * programs
    parts = empty(((programs + left) * 2 * rows * bm,), torch.float32, x.device) if share else y
    launch(
        mixed, (programs,), _descriptor(x, (bm, 64)), w,
        _descriptor(scale, (1, 2 * rows), swizzled=False) if scaled else scale,
        scale if zero is None else _descriptor(zero, (1, 2 * rows), swizzled=False),
        scale if bias is None else bias, _descriptor(y, (bm // pieces, rows)), parts,
        counters(2 * left, x.device) if share else y,
        m, n, blocks, weight.group // 128 if scale.shape[0] > 1 else blocks, waves, share,
        BITS=weight.bits, BM=bm, STAGES=_STAGES[weight.bits, bm], GROUP=2048 // bm, SCALED=scaled,
        ZERO=weight.zero_kind, BIAS=bias is not None, PIECES=pieces, U=1 if bm > 128 else 2, SPREAD=share > 0,
        **options(device, 4),
    )  # fmt: skip
    return y


def spread(tiles: int, steps: int, config: Config, device: Device) -> tuple[int, int, int]:
    """How ``tiles`` of so many steps of K are spread: whole tiles of a program, its share of the rest, programs."""
    if not config.even:
        if config.split == 1:
            return 1, 0, tiles
        share = -(-steps // config.split)
        return 0, share, -(-tiles * steps // share)
    programs = config.even * device.sms
    waves, left = divmod(tiles, programs)
    share = -(-left * steps // programs)
    return waves, share, programs if waves else -(-tiles * steps // share)


def _waves(tiles: int, steps: int, config: Config, device: Device) -> tuple[int, int, int]:
    """`spread` for programs that are at most as many as multiprocessors."""
    if config.even or (config.split > 1 and tiles * config.split <= device.sms):
        return spread(tiles, steps, config, device)
    programs = min(device.sms, tiles)
    return -(-tiles // programs), 0, programs


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
