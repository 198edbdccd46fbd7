"""The host's side of row gathers: sizes, grid and launch of `qcore_cuda.portable.kernels.gather`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .launch import launch
from .portable.kernels.gather import gather
from .portable.packing import block_size
from .portable.weights import Weight

_COLUMNS = 4096
"""Columns per program: 16 bytes of int4 codes per thread."""
# Debug is what turns assertions on. It comes with checks of every integer operation, which are not wanted. Triton's
# interpreter knows neither.
_OPTIONS = {} if triton.knobs.runtime.interpret else {"debug": True, "sanitize_overflow": False}


def rows(indices: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """Rows of a table ``(n, k)``: integer indices ``(T,)``, contiguous, to ``(T, k)`` of ``dtype``.

    Computed in float32 and rounded once. An index outside 0..n-1 ends in a device-side assertion.
    """
    tokens, d = indices.shape[0], weight.k
    out = torch.empty((tokens, d), dtype=dtype, device=indices.device)
    if not tokens:
        return out
    block = weight.order or block_size(weight.group if weight.group < d else None)
    blocks = -(-d // block)
    together = min(triton.next_power_of_2(blocks), _COLUMNS // block)
    grid = (tokens, -(-blocks // together))
    launch(
        gather, grid, indices, weight.data, weight.scale, weight.scale if weight.zero is None else weight.zero, out,
        weight.n, d, weight.group, blocks, weight.data.stride(0),
        BITS=weight.bits, P=block, NB=together, ZERO=weight.zero_kind, num_warps=4, **_OPTIONS,
    )  # fmt: skip
    return out
