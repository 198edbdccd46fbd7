"""The product for many rows on Hopper, from torch tensors to the kernel ``mixed``, which is written in Gluon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .device import Device
from .hopper import usable
from .launch import launch, options
from .replay import empty
from .weights import FLOAT_ZERO, Weight

if TYPE_CHECKING:
    from .dispatch import Problem


def serves(device: Device, problem: Problem) -> bool:
    """Whether ``mixed`` computes a product.

    Sizes: what descriptors need. A scale comes before the product, rounded with the weight, or after all of K.
    """
    if device.arch != 90 or not usable() or not problem.narrow or problem.n % 16:
        return False
    if problem.bits == 4:
        return problem.block == 128 and (problem.whole or not problem.exact)
    return problem.whole


def mixed(x: Tensor, weight: Weight, bias: Tensor | None, device: Device, bm: int) -> Tensor:
    """``x @ W^T + bias`` in x's dtype, by tiles of ``bm`` tokens, or of fewer where fewer hold them all.

    X has rows on 16 bytes, and as many columns as the packed weight.
    """
    from .kernels.mixed import ROWS, mixed

    data, scale, zero = weight.data, weight.scale, weight.zero
    (m, columns), n, rows = x.shape, weight.n, ROWS.value
    bm = next(size for size in (64, 128, bm) if size >= min(m, bm))
    blocks = -(-columns // 128)
    scaled = scale.shape[0] > 1 or weight.zero_kind == FLOAT_ZERO
    pieces = 2 if bm > 128 else 1  # whole tiles of results would take the place of a stage
    y = empty((m, n), x.dtype, x.device)
    if weight.bits == 4:
        w = _descriptor(data.view(torch.int32).view(data.shape[0], -1), (rows // 16, 256), swizzled=False)
    else:
        w = _descriptor(data.view(torch.int16), (rows, 32))
    tiles = -(-n // (2 * rows)) * -(-m // bm)
    launch(
        mixed, (min(device.sms, tiles),), _descriptor(x, (bm, 64)), w,
        _descriptor(scale, (1, 2 * rows), swizzled=False) if scaled else scale,
        scale if zero is None else _descriptor(zero, (1, 2 * rows), swizzled=False),
        scale if bias is None else bias, _descriptor(y, (bm // pieces, rows)),
        m, n, blocks, weight.group // 128 if scale.shape[0] > 1 else blocks,
        BITS=weight.bits, BM=bm, STAGES=_STAGES[weight.bits, bm], GROUP=2048 // bm, SCALED=scaled,
        ZERO=weight.zero_kind, BIAS=bias is not None, PIECES=pieces, U=1 if bm > 128 else 2, **options(device, 4),
    )  # fmt: skip
    return y


_STAGES = {(4, 256): 5, (4, 128): 8, (4, 64): 8, (8, 256): 4, (8, 128): 8, (8, 64): 8}
"""How many stages shared memory holds, by bits and tokens of a tile."""


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
