"""oneDNN's int8 product: ``onednn::qlinear_pointwise`` on a prepacked weight, exact up to its float32 result.

This module works around three defects of the op (torch 2.9 to 2.13). int8 activations run a slow reference
implementation, so they are passed as uint8 = code + 128 with zero point 128. A zero point of the weight is silently
ignored, so none is passed. On a CPU without VNNI instructions, pairs of products saturate at 16 bits, which `is_exact`
detects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from .ops import on_cpu, op

OFFSET = 128
"""uint8 activations hold code + 128."""


@lru_cache(maxsize=4)
def is_exact(weight_bits: int) -> bool:
    """Whether the op exists and multiplies the most extreme codes of ``weight_bits`` exactly on this CPU."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_pointwise")):  # type: ignore[no-untyped-call]
        return False
    low, high = -(1 << (weight_bits - 1)), (1 << (weight_bits - 1)) - 1
    with on_cpu():
        codes = torch.full((33, 200), high, dtype=torch.int8)
        codes[1::2] = low
        x = torch.full((3, 200), 255, dtype=torch.uint8)
        x[1] = 0
        expected = 200.0 * torch.outer(x[:, 0].double() - OFFSET, codes[:, 0].double())  # every row is constant
        y = int8_product(x, [prepack(codes)], torch.ones(1, 33), torch.zeros(33, dtype=torch.int32))
        return torch.equal(y.double(), expected)


def prepack(codes: Tensor) -> Tensor:
    """Prepack int8 codes ``(N, K)`` to an opaque tensor in oneDNN's own layout."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(codes.contiguous(), None)
    return packed


def codes_of(packed: Sequence[Tensor]) -> Tensor:
    """Invert `prepack`, exactly: one prepacked weight per group to int8 codes ``(N, K)``."""
    return torch.cat([weight.to_dense() for weight in packed]).t().contiguous()


def int8_product(x: Tensor, weights: Sequence[Tensor], scale: Tensor, zeros: Tensor) -> Tensor:
    """Sum ``scale * ((x - 128) @ W^T)`` over the groups.

    ``x``: uint8 ``(M, K)``; ``weights``: one prepacked tensor per group of K; ``scale``: float32 ``(G, N)``; ``zeros``:
    int32 ``(N,)``. The result is float32 ``(M, N)``: int32 accumulation within a group, float32 between groups.
    """
    rows = x.shape[0]
    parts, end = _columns(_pad_rows(x), weights), (None, 1.0, 0, torch.float32)
    y = _unary()(parts[0], 1.0, OFFSET, weights[0], scale[0], zeros, *end, "none", [], "")
    for part, weight, s in zip(parts[1:], weights[1:], scale[1:], strict=True):
        _binary()(part, 1.0, OFFSET, weight, s, zeros, y, *end, 1.0, 0, "sum", 1.0, "none", [], "")
    return y if y.shape[0] == rows else y[:rows]


def scaled_product(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    scale: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute ``x_scale * scale * ((x - 128 - x_zero_point) @ W^T) + bias`` for one group, rounded once."""
    rows, x, zero = x.shape[0], _pad_rows(x), OFFSET + x_zero_point
    y = _unary()(x, x_scale, zero, weight, scale, zeros, bias, 1.0, 0, dtype, "none", [], "")
    return y if y.shape[0] == rows else y[:rows]


_UNPADDED_ROWS = 16
"""Up to this many rows, x is not padded."""


def _pad_rows(x: Tensor) -> Tensor:
    """Pad x ``(M, K)`` with rows to one of eight row counts between powers of two: at most one eighth more.

    oneDNN compiles and keeps half a megabyte of code and tables per row count, 0.5 GB for all counts up to 1024.
    """
    rows = x.shape[0]
    if rows <= _UNPADDED_ROWS:
        return x
    step = 1 << (rows - 1).bit_length() - 4
    return F.pad(x, (0, 0, 0, -rows % step)) if rows % step else x


def traced_product() -> Callable[..., Tensor]:
    """Return `int8_product` as the op ``qcore_torch::int8_product``, for graphs. Call it before tracing."""
    return op(int8_product, _fake_product)


def traced_codes() -> Callable[..., Tensor]:
    """Return `codes_of` as an op: a graph unpacks the weight for gradients, and no fake tensor can be opaque."""
    return op(codes_of, _fake_codes)


def _fake_codes(packed: Sequence[Tensor]) -> Tensor:
    rows = sum(int(weight.shape[0]) for weight in packed)
    # A layout is given: with torch 2.15 a fake tensor has the opaque one of oneDNN, which meta tensors cannot have.
    return packed[0].new_empty(packed[0].shape[1], rows, dtype=torch.int8, layout=torch.strided)


def _fake_product(x: Tensor, _weights: Sequence[Tensor], scale: Tensor, _zeros: Tensor) -> Tensor:
    return scale.new_empty(x.shape[0], scale.shape[1])


def _columns(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split x into the columns of each group, contiguous."""
    groups = len(weights)
    if groups == 1:
        return (x,)
    if x.shape[1] % groups == 0 and weights[0].shape == weights[-1].shape:
        return x.view(x.shape[0], groups, -1).transpose(0, 1).contiguous().unbind()
    sizes = [int(w.shape[0]) for w in weights]
    return [part.contiguous() for part in torch.split(x, sizes, dim=1)]


@lru_cache(maxsize=1)
def _unary() -> Callable[..., Tensor]:
    return torch.ops.onednn.qlinear_pointwise.default


@lru_cache(maxsize=1)
def _binary() -> Callable[..., Tensor]:
    return torch.ops.onednn.qlinear_pointwise.binary
