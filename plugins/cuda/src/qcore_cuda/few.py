"""Products for few rows on NVIDIA, `gemv` and `int8_gemv`: how large their rings are, and their launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcore_triton.weights import Weight

from .device import Device
from .kernels.gemv import gemv
from .kernels.int8_gemv import int8_gemv
from .kernels.ring import STATIC, scratch
from .launch import asks, launch, options

ROWS = 16
"""The largest M that the kernels take."""
_COLUMN_BLOCK = 8


class Shape(NamedTuple):
    """How a program is made up.

    **Fields:** ``row_blocks``: of 16 rows of W; ``unroll``: blocks of K that a warp takes at a time; ``warps``;
    ``stages``: of a warp's ring; ``late``: the next kernel may begin when this one has read all, not when it has begun.
    """

    row_blocks: int
    unroll: int
    warps: int
    stages: int
    late: bool = False

    @classmethod
    def of(cls, config: Any) -> Shape:
        """The shape that a `dispatch.Config` or `int8_config.Config` of kernel "gemv" stands for."""
        return cls(config.bn // 16, config.unroll, config.warps, config.stages, config.late)


class Ring(NamedTuple):
    """What a ring holds, in bytes.

    **Fields:** for each block of K: ``block``: 16 rows of W; ``x``: rows of x; ``parameters``: scales and zero points
    of 16 rows; ``blank``: zeros. ``fixed``: what stands beside the ring.
    """

    block: int
    x: int
    parameters: int
    blank: int
    fixed: int = 0

    def size(self, shape: Shape) -> int:
        """Of all warps together."""
        rows = shape.row_blocks * (self.block + self.parameters)
        return shape.warps * shape.unroll * (shape.stages * (rows + self.x) + self.blank) + self.fixed

    def fitted(self, shape: Shape, device: Device) -> Shape:
        """The shape, made smaller where it would take more shared memory than there is."""
        # Triton names its shared memory, where a ring that was asked for begins, if warps have something to exchange.
        most = device.shared if asks() and shape.warps > 1 else STATIC
        while self.size(shape) + scratch(shape.warps) > most:
            if shape.stages > 2:
                shape = shape._replace(stages=shape.stages - 1)
            elif shape.unroll > 1:
                shape = shape._replace(unroll=shape.unroll // 2)
            elif shape.row_blocks > 1:
                shape = shape._replace(row_blocks=shape.row_blocks // 2)
            else:
                shape = shape._replace(warps=shape.warps // 2)
        return shape


def _meta(ring: Ring, shape: Shape, device: Device, m: int) -> dict[str, Any]:
    """Constexprs and options that both kernels have."""
    wide = -(-m // _COLUMN_BLOCK)
    size = ring.size(shape)
    return {
        "NB": wide, "XR": _x_rows(m), "R": shape.row_blocks, "U": shape.unroll, "NW": shape.warps,
        "STAGES": shape.stages, "LATE": shape.late, "RING": size,
        "DYNAMIC": size if size + scratch(shape.warps) > STATIC else 0,
        **options(device, shape.warps),
    }  # fmt: skip


def _x_rows(m: int) -> int:
    return 1 if m == 1 else -(-m // _COLUMN_BLOCK) * _COLUMN_BLOCK


def _weight_ring(weight: Weight, grouped: bool, x: int, blank: int, fixed: int = 0) -> Ring:
    """``x``, ``blank``: bytes for each block of K."""
    of_row = weight.scale.element_size() + (0 if weight.zero is None else weight.zero.element_size())
    return Ring(2 * weight.block * weight.bits, x, 16 * of_row if grouped and _even(weight) else 0, blank, fixed)


def _even(weight: Weight) -> bool:
    """Whether the scales and zero points of 16 rows can be copied 16 bytes at a time."""
    parts = (weight.scale,) if weight.zero is None else (weight.scale, weight.zero)
    return weight.n % 16 == 0 and not any(part.data_ptr() % 16 for part in parts)


def _placed(weight: Weight) -> Weight:
    """The weight with codes on 16 bytes: a copy of those that are a view into the middle of something."""
    return weight if weight.data.data_ptr() % 16 == 0 else weight._replace(data=weight.data.clone())


def _sized(shape: Shape, weight: Weight) -> Shape:
    """Configurations count blocks of 128 codes of int4, or 64 of int8: more of smaller ones."""
    return shape._replace(unroll=shape.unroll * max(1, 512 // (weight.block * weight.bits)))


def _sizes(weight: Weight) -> tuple[int, ...]:
    """Rows, blocks of K, blocks per group, and the row pitch of rows16 in units of 32."""
    four, block = weight.bits == 4, weight.block
    blocks = weight.data.shape[1] if four else weight.data.shape[1] // block
    per = weight.group // block if weight.scale.shape[0] > 1 else blocks
    return weight.data.shape[0] * (16 if four else 1), blocks, per, 0 if four else weight.data.shape[1] // 32


def float_product(x: Tensor, weight: Weight, bias: Tensor | None, y: Tensor, device: Device, shape: Shape) -> None:
    """``y = x @ W^T + bias``: x ``(M, K)`` of 16-bit floats, M <= ROWS, filled up and aligned as `gemv` asks for."""
    weight = _placed(weight)
    m, block, (data, scale, zero, *_) = x.shape[0], weight.block, weight
    # Tensor cores cut long sums off, which shows in float32.
    one_group = scale.shape[0] == 1 and y.dtype != torch.float32
    rows_of_x = 2 * block * _x_rows(m)
    ring = _weight_ring(weight, not one_group, rows_of_x, 2 * block if m == 1 else 0)
    shape = ring.fitted(_sized(shape, weight), device)
    rows, blocks, per, pitch = _sizes(weight)
    launch(
        gemv, (-(-weight.n // (16 * shape.row_blocks)),),
        x, data, scale, scale if zero is None else zero, scale if bias is None else bias, y,
        m, weight.n, rows, blocks, per, x.stride(0), pitch,
        BITS=weight.bits, P=block, ZERO=weight.zero_kind, BIAS=bias is not None, ONE_GROUP=one_group,
        BF16=x.dtype == torch.bfloat16, ALIGNED=_even(weight),
        **_meta(ring, shape, device, m),
    )  # fmt: skip


class Activations(NamedTuple):
    """What `int8_product` multiplies by.

    **Fields:** ``x``: codes ``(M, KQ)`` as `int8.Codes`, or one row of floats; ``scale``, ``zero``: ``(M,)`` of codes,
    or given for the row; ``numbers``: scale and zero point given as numbers; ``mode``: of `kernels.quantize`, -1 for
    codes; ``shifted``: whether there is a zero point.
    """

    x: Tensor
    scale: Tensor | None
    zero: Tensor | None
    numbers: tuple[float, float]
    mode: int
    shifted: bool


def int8_product(
    a: Activations,
    weight: Weight,
    sums: Tensor | None,
    end: tuple[tuple[Any, ...], tuple[float, float], dict[str, Any]],
    y: Tensor,
    device: Device,
    shape: Shape,
    grouped: bool,
) -> None:
    """``y``, of M <= ROWS rows. ``end``: arguments, numbers and constexprs of the epilogue."""
    weight = _placed(weight)
    m, fused, block = y.shape[0], a.mode >= 0, weight.block
    wide = _capacity(weight.k) if fused else 0
    x_bytes = 0 if fused else block * _x_rows(m)
    ring = _weight_ring(weight, grouped, x_bytes, block if m == 1 else 0, wide)
    shape = ring.fitted(_sized(shape, weight), device)
    rows, blocks, per, pitch = _sizes(weight)
    after, out_numbers, out_meta = end
    scale = y if a.scale is None else a.scale
    launch(
        int8_gemv, (-(-weight.n // (16 * shape.row_blocks)),),
        a.x, weight.data, weight.scale, weight.scale if weight.zero is None else weight.zero,
        y if sums is None else sums, scale, scale if a.zero is None else a.zero, *after, y, *a.numbers, *out_numbers,
        m, weight.n, weight.k, rows, blocks, per, 0 if fused else a.x.shape[1] // 128, pitch,
        BITS=weight.bits, P=block, WZERO=weight.zero_kind, XZERO=a.shifted, GROUPED=grouped, MODE=a.mode, WIDE=wide,
        ALIGNED=_even(weight), **out_meta, **_meta(ring, shape, device, m),
    )  # fmt: skip


def _capacity(k: int) -> int:
    """Bytes for the codes of a row: few different ones, each is compiled for itself."""
    return max(4096, 1 << (k - 1).bit_length())


def quantizes_itself(x: Tensor, weight: Weight, device: Device) -> bool:
    """Whether `int8_gemv` can quantize x: one row of 16-bit floats that it can read in wide pieces, and hold."""
    whole = x.dtype in {torch.bfloat16, torch.float16} and x.shape[0] == 1 and x.shape[1] % 8 == 0
    held = _capacity(weight.k) <= (device.shared if asks() else STATIC) // 2
    return whole and held and x.stride(1) == 1 and x.data_ptr() % 16 == 0
