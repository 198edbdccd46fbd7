"""Activations as int8 codes, and the common arguments of int8 products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcore_triton import host
from qcore_triton.codes import Codes, Given, Mode, columns_of_codes, mode_of
from qcore_triton.geometry import power_of_two
from qcore_triton.host import CODE_ROWS, End

from ..problem import GemmProblem
from ..runtime.device import Device, device_of
from ..runtime.launch import launch, options
from ..runtime.replay import empty
from .aligned import result
from .base import Operands

_IN_REGISTERS = 32768
"""Rows up to this K are read once."""


def quantize_rows(x: Tensor, *, symmetric: bool, total: bool = False, order: int = 0) -> Codes:
    """Quantize x ``(M, K)`` of any strides, each token by parameters of its own.

    ``total``: also sum the codes; ``order``: as `Weight.order` of the weight that they meet.
    """
    return codes_of(x, mode_of(x, symmetric, None), total, order, device_of(x.device))


def codes_of(x: Tensor, mode: Mode, total: bool, order: int, device: Device, dtype: torch.dtype = torch.int8) -> Codes:
    """`quantize_rows` as ``mode`` says, codes held in ``dtype``; an int8 x is taken as codes."""
    m, k = x.shape
    block = min(_IN_REGISTERS, max(512, power_of_two(columns_of_codes(k))))
    meta = options(device, max(1, min(16, block // 512 if m <= 256 else block // 1024)))
    return host.quantize_rows(launch, empty, x, mode, total=total, order=order, block=block, dtype=dtype, **meta)


class Int8Arguments(NamedTuple):
    """Arguments that the launches of int8 products have in common.

    **Fields:** ``y``: the result, to be filled; ``of_x``: scale and zero point of x; ``of_w``: scale, zero point and
    sums of the weight; ``end``: of the epilogue; ``blocks``: steps along K; ``form``: constexprs of the product.
    """

    y: Tensor
    of_x: tuple[Tensor, ...]
    of_w: tuple[Tensor, ...]
    end: End
    blocks: int
    form: dict[str, Any]


def arguments_of(codes: Codes, operands: Operands, problem: GemmProblem, *, tiles: bool = False) -> Int8Arguments:
    """Allocate the result, and substitute another tensor for each one that is absent.

    ``tiles``: it is stored through a descriptor, see `aligned.result`.
    """
    weight, sums, bias, out = operands
    (m, _), dtype, device = codes.q.shape, problem.out_dtype, codes.q.device
    y = result(m, problem.n, dtype, device) if tiles else empty((m, problem.n), dtype, device)
    end = host.end_of(bias, out, y)
    blocks = weight.data.shape[1] if weight.bits == 4 else -(-problem.k // problem.step)
    # An int4 weight that was unpacked has no integer zero points left.
    form = {
        "P": problem.step, "GROUPED": problem.grouped, "PER": problem.per, "WZERO": weight.zero_kind,
        "XZERO": codes.zero is not None, **end.meta,
    }  # fmt: skip
    return Int8Arguments(y, *host.operands(codes, weight, sums), end, blocks, form)


def rows_in_memory(q: Tensor) -> int:
    """Rows of codes up to a multiple of `CODE_ROWS`, if memory has so many; results for those behind are not stored.

    Copies of tiles that end behind the last row are slower than those of whole tiles.
    """
    rows, room = -(-len(q) // CODE_ROWS) * CODE_ROWS, q.untyped_storage().nbytes() // q.element_size()
    return rows if q.storage_offset() + rows * q.stride(0) <= room else len(q)


def x_sums(codes: Codes, args: Int8Arguments, device: Device) -> Tensor:
    """Sums of x that zero points of the weight multiply: int32 ``(blocks, M)``, or ``(1, M)`` per channel."""
    form = args.form
    meta = options(device, 4)
    return host.x_sums(launch, empty, codes, form["WZERO"], form["GROUPED"], form["P"], args.blocks, **meta)


def given(scale: Tensor | float | None, zero: Tensor | float | None) -> Given | None:
    """How int8 results are quantized, or None."""
    return None if scale is None else Given(scale, 0.0 if zero is None else zero)
