"""int8 activations as bfloat16 numbers and a scale per row, for products of several experts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qcore_triton.codes import TENSOR, Mode
from qcore_triton.geometry import power_of_two

from ..kernels.grouped_codes import centred_codes
from ..runtime.device import Device
from ..runtime.launch import launch, options
from ..runtime.replay import empty

_IN_REGISTERS = 16384
"""Rows up to this K are read once."""


class Centred(NamedTuple):
    """**Fields:** ``q``: bfloat16 ``(T, columns)``, codes less their zero point; ``scale``: float32 ``(T,)``."""

    q: Tensor
    scale: Tensor


def centred(x: Tensor, mode: Mode, columns: int, order: int, device: Device) -> Centred:
    """Quantize x ``(T, K)`` of any strides as ``mode`` says, by numbers or per row; an int8 x holds codes already.

    ``columns``: of the result, zeros behind K; ``order``: of its columns, see `column_of`.
    """
    (t, k), (kind, scale, zero) = x.shape, mode
    q, scales = empty((t, columns), torch.bfloat16, x.device), empty((t,), torch.float32, x.device)
    block = min(_IN_REGISTERS, max(512, power_of_two(columns)))
    launch(
        centred_codes, (t,), x, q, scales, k, columns, x.stride(0) if t > 1 else 0, x.stride(1) if k > 1 else 1,
        scale if kind == TENSOR else 0.0, zero if kind == TENSOR else 0.0,
        MODE=kind, CODES=x.dtype == torch.int8, BLOCK=block, LOOP=columns > block, ORDER=order,
        **options(device, max(1, min(16, block // 512))),
    )  # fmt: skip
    return Centred(q, scales)
