"""``torch.cpu.int8pack``: bfloat16 x and a symmetric per-channel int8 weight, for a CPU without VNNI instructions.

``aten::_weight_int8pack_mm`` reads the neutral bytes directly, once per row of x; for more rows the weight is converted
to bfloat16, as in `PlainLinear`. Three defects of the op limit its use: in bfloat16, a K that is not a multiple of 16
gives garbage or a crash, an x that does not start at a multiple of 16 bytes crashes, and other dtypes run scalar code.

The op rounds its result to bfloat16 before the bias is added: where the two cancel, the error is up to 3 times the
contract's tolerance. As further columns of codes the bias would be added before, in 1.3 to 3.5 times the time of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contracts import LinearRequest
from ..discovery.kernels import Packed
from ..formats import Format
from ..formats.tracing import runs_now
from .integer import concatenated, split_bias
from .ops import int8_product, op
from .plain_linear import PlainLinear

_CROSSOVER = 24
"""Measured at 4096 x 4096 on AVX-512: the op costs 0.1 ms per row, the conversion 2.3 ms plus 0.035 ms per row."""
_ALIGNMENT = 16
_CHUNK = 1 << 20
"""Weights converted to bfloat16 at a time, so that they stay in the cache."""


class CpuInt8Pack(PlainLinear):
    """`PlainLinear` with the product of ATen; the packed weight is the neutral weight."""

    def __init__(self, request: LinearRequest) -> None:
        super().__init__(request)
        self.name = "torch.cpu.int8pack"
        self._traced = op(int8pack, _fake)  # registered here: a trace cannot register ops

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **_runtime_params: Tensor) -> Tensor:
        call = int8pack if runs_now(x) else self._traced
        return call(x, packed["data"], packed["scale"], bias)


def int8pack(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x ``(M, K)`` bfloat16 by data ``(N, K)`` int8 times scale ``(1, N)``, to bfloat16 ``(M, N)``."""
    if x.shape[0] < _CROSSOVER:
        assert int8_product is not None  # without the op, the kernel is not offered
        y = int8_product(_aligned(x.contiguous()), data.contiguous(), scale[0].to(torch.bfloat16))
        return y if bias is None else (y + bias).to(torch.bfloat16)
    rows = max(64, _CHUNK // data.shape[1])
    inside, rest = (None, None) if bias is None else split_bias(bias, scale[0].float())
    weights = torch.split(data, rows)
    starts = (None,) * len(weights) if inside is None else torch.split(inside, rows)
    parts = zip(weights, starts, strict=True)
    y = concatenated([F.linear(x, part.to(torch.bfloat16), start) for part, start in parts]).float() * scale
    return (y if rest is None else y + rest).to(torch.bfloat16)


def _aligned(x: Tensor) -> Tensor:
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


def _fake(x: Tensor, data: Tensor, *_parameters: object) -> Tensor:
    return x.new_empty(x.shape[0], data.shape[0])


def why_not(request: LinearRequest) -> str:
    """Why the kernel does not support ``request``; empty if it does."""
    if request.device.type != "cpu" or not request.x_dtype == request.out_dtype == torch.bfloat16:
        return "it needs bfloat16 on the CPU"
    if request.activation is not None or request.weight != Format("int8"):
        return "it needs float activations and int8 weights with one scale per channel"
    if request.k % 16 or not request.k:
        return f"it needs a K that is a multiple of 16, not {request.k}"
    return "" if int8_product is not None else "this torch has no _weight_int8pack_mm"


def kernel(request: LinearRequest) -> CpuInt8Pack:
    """Return the kernel for a request that `why_not` accepts."""
    return CpuInt8Pack(request)
