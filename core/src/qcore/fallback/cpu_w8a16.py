"""``torch.cpu.w8a16``: float activations and int8 weights on oneDNN's int8 product, as accurate as a float32 product.

A row of x is converted to fixed point: integers times a power of two, in three or four signed 8-bit digits. Each digit
is one row of the int8 product. This leaves an error of one part in ``2**22`` (``2**30``) of the row's maximum in every
element, which is too much if an outlier has a small weight and the other elements dominate the result. Such rows get
more digits: the residual is converted to fixed point in turn, until it is small enough.

Two bounds decide when it is. Let M be the maximum of abs(x), A the sum of abs(x), and S the sum of a row of abs(W), of
which all but ``spread * K`` elements are at least ``S / (16 K)``. The error is at most ``2**-bits M S``. The allowed
error is a fraction of sum(abs(x) abs(W)), which is at least ``(A / M - spread * K) M S / (16 K)``: the worst case has M
at the smallest weights.
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
from .codes import digit_rows, group_sums, to_fixed_point
from .cpu_int8 import MAX_ROWS, CpuInt8, scale32
from .integer import RuntimeParams, finish
from .ops import op
from .weights import WeightReader

_SMALL = 16
"""A weight is small if it is below 1/16 of its row's mean."""
_PARTS = 1 << 20
_LIFT = 2.0**64
"""Factor for residuals of x that are close to the smallest float32."""


class CpuFloatActivations(CpuInt8):
    """Float x and int8 weights with any groups and zero points.

    Packed: as in `CpuInt8`, plus ``spread``: the largest fraction of small weights in any row, float32 ``()``.
    """

    def __init__(self, request: LinearRequest) -> None:
        super().__init__("torch.cpu.w8a16", request)
        self.digits = 3 if request.x_dtype == torch.bfloat16 else 4
        limit = _SMALL * self.k * _required_sum(request.x_dtype, self.k, 8 * self.digits - 2)
        self._limit_parts = math.ceil(limit * _PARTS)  # an integer: see `smallest_scale`
        self._traced_float = op(float_product, _fake)  # registered here: a trace cannot register ops

    @property
    def _limit(self) -> float:
        """What the sum of a row must reach; see `_terms`."""
        return self._limit_parts / _PARTS

    @property
    def packing(self) -> str:
        return self.name

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        return {**super().pack(weight), "spread": _spread(weight)}

    def _rows(self, x: Tensor, packed: Packed, bias: Tensor | None, runtime_params: RuntimeParams) -> Tensor:
        eager = type(x) is Tensor and not torch.compiler.is_compiling()
        call = float_product if eager else self._traced_float
        weight = (self._weights(packed), scale32(packed), packed["zeros"], packed.get("added"), packed["spread"])
        return finish(
            call(x, *weight, self.group, self.digits, self._limit), 1.0, bias, None, self.out_dtype, runtime_params
        )


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
    """Multiply x ``(M, K)`` by the packed weight of `CpuFloatActivations`, to float32 ``(M, N)``.

    ``limit``: the smallest ratio of a row's absolute sum to its maximum for which one term is accurate enough, if no
    weight is small.
    """
    if x.shape[0] > MAX_ROWS:
        rest = (weights, scale, zeros, added, spread, group, digits, limit)
        return torch.cat([float_product(part, *rest) for part in torch.split(x, MAX_ROWS)])
    terms = _terms(x, digits, limit + float(spread) * x.shape[1])
    planes = [digit_rows(term.values, term.digits) for term in terms]
    products = onednn.int8_product(planes[0] if len(planes) == 1 else torch.cat(planes), weights, scale, zeros)
    y, start = None, 0
    for term, plane in zip(terms, planes, strict=True):
        partial = _combine_digits(products[start : start + plane.shape[0]], term, added, group)
        y, start = partial if y is None else y.index_add_(0, term.rows, partial), start + plane.shape[0]
    assert y is not None
    return y


def _fake(x: Tensor, _weights: Sequence[Tensor], scale: Tensor, *_rest: object) -> Tensor:
    return scale.new_empty(x.shape[0], scale.shape[1])


class _Term:
    """A fixed-point term of some ``rows`` of x, ``values * scale * inverse_lift``; x is the sum of its terms."""

    def __init__(self, x: Tensor, rows: Tensor, digits: int, limit: float, inverse_lift: Tensor | None = None) -> None:
        self.rows, self.digits, self.inverse_lift = rows, digits, inverse_lift
        self.values, self.scale, self.coarse = to_fixed_point(x, 8 * digits - 2, limit)


def _terms(x: Tensor, digits: int, limit: float) -> list[_Term]:
    terms = [_Term(x, torch.empty(0), digits, limit)]
    if terms[0].coarse is None:  # the common case: return before the costlier steps
        return terms
    terms[0].rows = torch.arange(x.shape[0])
    # The residual of a 16-bit x has few bits.
    fewer = 2 if digits == 3 else 4
    while (term := terms[-1]).coarse is not None:
        scale = term.scale if isinstance(term.scale, float) else term.scale[term.coarse]
        residual = x[term.coarse].float() - term.values[term.coarse] * scale
        nonzero = residual.abs().amax(-1) > 0.0
        x, kept = residual[nonzero], term.coarse[nonzero]
        if not kept.numel():
            break
        lift = torch.where(x.abs().amax(-1, keepdim=True) < _LIFT**-0.5, _LIFT, 1.0)
        x, inverse_lift = x * lift, 1.0 / lift if term.inverse_lift is None else term.inverse_lift[kept] / lift
        terms.append(_Term(x, term.rows[kept], fewer, limit if fewer == 4 else math.inf, inverse_lift))
    return terms


def _combine_digits(products: Tensor, term: _Term, added: Tensor | None, group: int) -> Tensor:
    """Combine the products of the digits ``(digits * M, N)`` with zero point and scale to ``(M, N)``."""
    planes = products.view(term.digits, -1, products.shape[1])
    y = planes[0]
    for i in range(1, term.digits):
        y = y.add_(planes[i], alpha=256.0**i)
    if added is not None:
        y = y.addmm_(group_sums(term.values, group), added)
    y = y * term.scale  # not in place: a view would keep the products of all digits in memory with the result
    return y if term.inverse_lift is None else y.mul_(term.inverse_lift)


def _required_sum(dtype: torch.dtype, k: int, bits: int) -> float:
    """Return the smallest sum(abs(x) abs(W)), in units of M S, for which the error is half of the allowed one.

    The allowed error is ``2**-20`` of that sum, or for a 16-bit x ``4 * ROUNDING / sqrt(K)`` (by the inequality of the
    arithmetic and the quadratic mean).
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


def why_not(request: LinearRequest) -> str:
    """Why the kernel does not support ``request``; empty if it does."""
    if request.device.type != "cpu" or not (request.n and request.k):
        return "it runs on the CPU, with weights that are not empty"
    if request.activation is not None or request.weight.bits != 8:
        return "it needs float activations and int8 weights"
    if request.x_dtype not in _DTYPES:
        return "it needs float32, bfloat16 or float16 activations"
    return "" if onednn.is_exact(8) else "oneDNN's int8 product is missing, or not exact on this CPU"


def kernel(request: LinearRequest) -> CpuFloatActivations:
    """Return the kernel for a request that `why_not` accepts."""
    return CpuFloatActivations(request)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""float64 is left out: the digits would not hold all of its bits."""
