"""Rows of a packed table by index, dequantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qcore.plugin_api import check_indices
from qcore_triton import host
from qcore_triton.weights import Weight

from .device import interpreted, launch

_COLUMNS = 2048
"""Columns per program: 16 bytes of int4 codes for each of 64 lanes."""
# Debug turns assertions on, and with them checks of every integer operation, which are switched off again. Triton's
# interpreter supports neither.
_ASSERTING: dict[str, Any] = {"debug": True, "sanitize_overflow": False}


def rows(indices: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """Rows of a table ``(n, k)``: integer indices ``(T,)``, contiguous, to ``(T, k)`` of ``dtype``.

    Computed in float32 and rounded once. An index outside 0..n-1 triggers a device-side assertion, or (on some
    GPUs it has no effect: intel-xpu-backend-for-triton issue 5691) gives a row of NaN; if tensors are on the CPU, it
    raises `IndexError`. Torch's own check would take five more launches per call.
    """
    if indices.device.type == "cpu":
        check_indices(indices, weight.n)
    meta = {} if interpreted() else _ASSERTING
    return host.table_rows(launch, indices, weight, dtype, _COLUMNS, pieces=True, num_warps=4, **meta)
