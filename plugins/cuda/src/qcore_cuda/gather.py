"""The host's side of row gathers: sizes, grid and launch of `qcore_triton.kernels.gather`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from qcore_triton import host
from qcore_triton.weights import Weight

from .runtime.launch import launch

_COLUMNS = 4096
"""Columns per program: 16 bytes of int4 codes per thread."""
# `debug` enables assertions and checks of every integer operation; the latter are disabled again. Triton's interpreter
# supports neither option.
_OPTIONS = {} if triton.knobs.runtime.interpret else {"debug": True, "sanitize_overflow": False}


def rows(indices: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """Rows of a table ``(n, k)``: integer indices ``(T,)``, contiguous, to ``(T, k)`` of ``dtype``.

    Computed in float32 and rounded once. An index outside 0..n-1 triggers a device-side assertion.
    """
    return host.table_rows(launch, indices, weight, dtype, _COLUMNS, pieces=False, num_warps=4, **_OPTIONS)
