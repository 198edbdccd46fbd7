"""``torch.cpu.w8a16``: float activations and int8 weights on oneDNN's int8 product, as exact as a float32 product.

A row of x is written as whole numbers times a power of two, in three or four signed digits of eight bits; each digit is
one row of the int8 product. That leaves an error of one part in ``2**22`` (``2**30``) of the row's largest value in
every element, which is too much where an outlier meets a small weight and the others decide. Such rows get more digits:
what the first ones left is written as whole numbers in turn, until it is small enough.

Whether it is follows from two bounds. Let M be the largest abs(x), A their sum and S the sum of a row of abs(W), of
which all but ``spread * K`` are at least ``S / (16 K)``. The error is at most ``2**-bits M S``; sum(abs(x) abs(W)), of
which a part is allowed, is at least ``(A / M - spread * K) M S / (16 K)``, what remains with M at the smallest weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..contracts import LinearRequest
from ..contracts.base import ROUNDING
from ..discovery.kernels import Packed
from ..weights.qtensor import QTensor
from . import onednn
from .codes import digit_rows, group_sums, whole_numbers
from .cpu_int8 import MOST_ROWS, CpuInt8, scale32
from .integer import Given, finish
from .ops import op
from .weights import WeightReader

_SMALL = 16
"""A weight is small below this part of its row's mean."""
_LIFT = 2.0**64
"""What is left of x is multiplied by it near the end of float32."""


class CpuFloatActivations(CpuInt8):
    """Float x and int8 weights of any groups and zero points.

    Packed: as `CpuInt8`, and ``spread``: the largest part of a row's weights that are small, float32 ``()``.
    """

    def __init__(self, request: LinearRequest) -> None:
        super().__init__("torch.cpu.w8a16", request)
        self.digits = 3 if request.x_dtype == torch.bfloat16 else 4
        self._limit = _SMALL * self.k * _needed(request.x_dtype, self.k, 8 * self.digits - 2)
        self._traced_float = op(float_product, _fake)  # here, because a trace cannot register it

    @property
    def packing(self) -> str:
        return self.name

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        return {**super().pack(weight), "spread": _spread(weight)}

    def _rows(self, x: Tensor, packed: Packed, bias: Tensor | None, given: Given) -> Tensor:
        eager = type(x) is Tensor and not torch.compiler.is_compiling()
        call = float_product if eager else self._traced_float
        weight = (self._weights(packed), scale32(packed), packed["zeros"], packed.get("added"), packed["spread"])
        return finish(call(x, *weight, self.group, self.digits, self._limit), 1.0, bias, None, self.out_dtype, given)


def float_product(
    x: Tensor,
    weights: Sequence[Tensor],
    scale: Tensor,
    zeros: Tensor,
    added: Tensor | None,
    spread: Tensor,
    group: int,
    digits: int,
    limit: float,
) -> Tensor:
    """Multiply x ``(M, K)`` to float32 ``(M, N)``; see `CpuFloatActivations` for the weight.

    ``limit``: how often the largest of a row its absolute values must sum up to, were no weights small.
    """
    if x.shape[0] > MOST_ROWS:
        rest = (weights, scale, zeros, added, spread, group, digits, limit)
        return torch.cat([float_product(part, *rest) for part in torch.split(x, MOST_ROWS)])
    parts = _parts(x, digits, limit + float(spread) * x.shape[1])
    planes = [digit_rows(part.values, part.digits) for part in parts]
    products = onednn.int8_product(planes[0] if len(planes) == 1 else torch.cat(planes), weights, scale, zeros)
    y, start = None, 0
    for part, plane in zip(parts, planes, strict=True):
        own = _joined(products[start : start + plane.shape[0]], part, added, group)
        y, start = own if y is None else y.index_add_(0, part.rows, own), start + plane.shape[0]
    assert y is not None
    return y


def _fake(x: Tensor, _weights: Sequence[Tensor], scale: Tensor, *_rest: object) -> Tensor:
    return scale.new_empty(x.shape[0], scale.shape[1])


class _Part:
    """Some ``rows`` of x, or what earlier parts left of them: ``values * scale * lowered``, values whole numbers."""

    def __init__(self, x: Tensor, rows: Tensor, digits: int, limit: float, lowered: Tensor | None = None) -> None:
        self.rows, self.digits, self.lowered = rows, digits, lowered
        self.values, self.scale, self.coarse = whole_numbers(x, 8 * digits - 2, limit)


def _parts(x: Tensor, digits: int, limit: float) -> list[_Part]:
    parts = [_Part(x, torch.empty(0), digits, limit)]
    if parts[0].coarse is None:  # before anything that costs a little
        return parts
    parts[0].rows = torch.arange(x.shape[0])
    # What the first digits leave of a narrow x has few bits.
    fewer = 2 if digits == 3 else 4
    while (part := parts[-1]).coarse is not None:
        scale = part.scale if isinstance(part.scale, float) else part.scale[part.coarse]
        left = x[part.coarse].float() - part.values[part.coarse] * scale
        some = left.abs().amax(-1) > 0.0
        x, kept = left[some], part.coarse[some]
        if not kept.numel():
            break
        lift = torch.where(x.abs().amax(-1, keepdim=True) < _LIFT**-0.5, _LIFT, 1.0)
        x, lowered = x * lift, 1.0 / lift if part.lowered is None else part.lowered[kept] / lift
        parts.append(_Part(x, part.rows[kept], fewer, limit if fewer == 4 else math.inf, lowered))
    return parts


def _joined(products: Tensor, part: _Part, added: Tensor | None, group: int) -> Tensor:
    """The digits' products ``(digits * M, N)`` put together, with zero point and scale: ``(M, N)``."""
    planes = products.view(part.digits, -1, products.shape[1])
    y = planes[0]
    for i in range(1, part.digits):
        y = y.add_(planes[i], alpha=256.0**i)
    if added is not None:
        y = y.addmm_(group_sums(part.values, group), added)
    y = y.mul_(part.scale)
    return y if part.lowered is None else y.mul_(part.lowered)


def _needed(dtype: torch.dtype, k: int, bits: int) -> float:
    """How large sum(abs(x) abs(W)) must be, in units of M S, for half of the error allowed to it.

    That is ``2**-20`` of it, or by the inequality between means ``4 * ROUNDING / sqrt(K)`` if x is narrow.
    """
    allowed = max(2.0**-20, 4 * ROUNDING[dtype] / math.sqrt(k))
    return 2.0 ** (1 - bits) / allowed


def _spread(weight: QTensor) -> Tensor:
    reader, worst = WeightReader(weight.format, weight.shape[1]), torch.zeros(())
    for chunk in reader.chunks(weight.tensors()):
        size = reader.dense(*chunk, torch.float32).abs_()
        small = size < size.mean(1, keepdim=True) / _SMALL
        worst = torch.maximum(worst, small.sum(1).max() / size.shape[1])
    return worst


def kernel(request: LinearRequest) -> CpuFloatActivations | None:
    """The kernel for ``request``, None where there is none."""
    fits = request.activation is None and request.weight.bits == 8 and request.x_dtype in _DTYPES
    if request.device.type != "cpu" or not (fits and request.n and request.k) or not onednn.is_exact(8):
        return None
    return CpuFloatActivations(request)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Not float64, of which digits hold a part only."""
