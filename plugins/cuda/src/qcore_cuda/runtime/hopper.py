"""The conditions for kernels in Gluon, and their tensor descriptors (TMA).

Gluon's interface is unstable: its kernels run only with versions of Triton that they were tested with, and on sm_90.
A kernel in plain Triton exists for everything that they compute.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .device import Device
from .launch import options

_TESTED = ("3.6.",)
ROOM = (227 << 10) - 2048
"""Bytes of shared memory for stages and pieces of the result; the rest holds barriers."""


@lru_cache(maxsize=1)
def usable() -> bool:
    """Whether the kernels in Gluon were tested with this version of Triton."""
    import triton

    return bool(triton.__version__.startswith(_TESTED))


def fits(device: Device, step: int) -> bool:
    """Whether kernels in Gluon support a weight, with steps of ``step`` columns along K."""
    return device.arch == 90 and step == 128 and usable()


def descriptor(tensor: Tensor, block: tuple[int, int], *, swizzled: bool = True) -> Any:
    """A descriptor of a matrix in blocks of ``block``; a view that is not aligned on 16 bytes is copied."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if tensor.data_ptr() % 16:
        tensor = tensor.clone()
    size, (rows, columns) = tensor.element_size(), tensor.shape
    layout = NVMMASharedLayout(min(128, block[1] * size) if swizzled else 0, 8 * size, 2)
    pitch = tensor.stride(0) if rows > 1 else columns  # the stride of a single row may be anything
    return TensorDescriptor(tensor, [rows, columns], [pitch, 1], list(block), layout)


def room_for(stage: int, slot: int, fixed: int, most: int) -> int:
    """The number of stages, at most ``most``, that shared memory has room for.

    Bytes: of a ``stage``; of a ``slot``, which two stages share; ``fixed``: next to them.
    """
    return next(n for n in range(most, 1, -1) if n * stage + -(-n // 2) * slot + fixed <= ROOM)


def early(device: Device, warps: int, *constants: Tensor | None) -> dict[str, Any]:
    """Options of a kernel that reads the weight before the previous kernel has ended, unless that one copies it.

    ``constants``: the tensors of a weight that `descriptor` copies if they are not aligned.
    """
    found = dict(options(device, warps))
    if any(tensor is not None and tensor.data_ptr() % 16 for tensor in constants):
        found["PDL"] = False
    return found


def int4_words(data: Tensor, columns: int = 128) -> Any:
    """A descriptor of int4 words in blocks of 4 groups of 16 rows and ``columns`` columns."""
    return descriptor(data.view(torch.int32).view(data.shape[0], -1), (4, 2 * columns), swizzled=False)
