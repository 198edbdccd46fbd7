"""Where the warp-specialized int8 kernels for sm_90 serve, and how a product is handed to them.

They are written in Gluon, the part of Triton that is no settled interface: so they are used with the versions they were
tried with, on sm_90 alone; everything that they compute has a kernel in plain Triton as well.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qcore_triton.weights import Weight

from .device import Device
from .launch import launch, options

_TRIED = ("3.6.",)
ROOM = (227 << 10) - 2048
"""Bytes of shared memory for stages and pieces of the result; the rest holds barriers."""


@lru_cache(maxsize=1)
def usable() -> bool:
    """Whether this is a Triton that the kernels in Gluon were tried with."""
    import triton

    return bool(triton.__version__.startswith(_TRIED))


def serves(device: Device, n: int, inner: int) -> bool:
    """Whether the kernels serve int8 weights of n rows, their K in steps of ``inner``."""
    return device.arch == 90 and inner == 128 and n % 16 == 0 and usable()


def computes(weight: Weight, grouped: bool, x_zero: Tensor | None, out_dtype: torch.dtype, out_scale: Any) -> bool:
    """Whether `product` computes it: no groups, no zero points, results of one or two bytes, not scaled by tokens."""
    plain = weight.bits == 8 and not grouped and weight.zero is None and x_zero is None
    return plain and out_dtype.itemsize <= 2 and not isinstance(out_scale, Tensor)


def product(r: Any) -> None:
    """Launch for an `int8._Product`."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .kernels.int8_hopper import specialized

    layout, c, data = gl.NVMMASharedLayout, r.config, r.weight.data
    (m, wide), n, bits, piece = r.codes.q.shape, r.weight.n, r.y.element_size() * 8, min(64, r.config.bn)
    x = TensorDescriptor(r.codes.q, [m, wide], [wide, 1], [c.bm, r.p], layout(128, 8, 2))
    w = TensorDescriptor(data, list(data.shape), [data.shape[1], 1], [c.bn, r.p], layout(128, 8, 2))
    y = TensorDescriptor(r.y, [m, n], [n, 1], [c.bm // 2, piece], layout(min(128, piece * bits // 8), bits, 2))
    stages = (ROOM - 2 * c.bm * piece * bits // 8) // ((c.bm + c.bn) * r.p)
    launch(
        specialized, (min(r.tiles, r.device.sms),),
        x, r.codes.scale, w, r.weight.scale, r.end.args[0], r.y, y, *r.end.numbers, m, n, r.blocks,
        P=r.p, BM=c.bm, BN=c.bn, STAGES=min(8, stages), GROUP_M=c.group_m, HAS_BIAS=r.form["HAS_BIAS"],
        OUT=r.form["OUT"], **options(r.device, 4),
    )  # fmt: skip
