"""oneDNN's int8 product: ``onednn::qlinear_pointwise`` on a weight prepacked once, exact to its float32 result.

Three faults of the op are kept out here (torch 2.9 to 2.13): int8 activations run a slow reference, so they are given
as uint8 = code + 128 with zero point 128; a zero point of the weight is ignored without a word, so none is passed;
and on a CPU without VNNI instructions pairs of products saturate at 16 bits, which `is_exact` finds out.
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
    """Whether the op is here and gets the most extreme codes of ``weight_bits`` right on this CPU."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_pointwise")):  # type: ignore[no-untyped-call]
        return False
    low, high = -(1 << (weight_bits - 1)), (1 << (weight_bits - 1)) - 1
    with on_cpu():
        codes = torch.full((33, 200), high, dtype=torch.int8)
        codes[1::2] = low
        x = torch.full((3, 200), 255, dtype=torch.uint8)
        x[1] = 0
        expected = 200.0 * torch.outer(x[:, 0].double() - OFFSET, codes[:, 0].double())  # rows are constant
        y = int8_product(x, [prepack(codes)], torch.ones(1, 33), torch.zeros(33, dtype=torch.int32))
        return torch.equal(y.double(), expected)


def prepack(codes: Tensor) -> Tensor:
    """Codes ``(N, K)`` int8 as an opaque tensor in oneDNN's own layout."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(codes.contiguous(), None)
    return packed


def codes_of(packed: Sequence[Tensor]) -> Tensor:
    """The inverse of `prepack` for one weight per group: int8 ``(N, K)``, exact."""
    return torch.cat([weight.to_dense() for weight in packed]).t().contiguous()


def int8_product(x: Tensor, weights: Sequence[Tensor], scale: Tensor, zeros: Tensor) -> Tensor:
    """Sum over groups of ``scale * ((x - 128) @ W^T)``.

    ``x``: uint8 ``(M, K)``; ``weights``: one prepacked tensor per group of K; ``scale``: float32 ``(G, N)``; ``zeros``:
    int32 ``(N,)``. The result is float32 ``(M, N)``: int32 accumulation within a group, float32 between groups.
    """
    rows = x.shape[0]
    parts, end = _columns(_bucketed(x), weights), (None, 1.0, 0, torch.float32)
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
    """One group and one activation scale: ``x_scale * scale * ((x - 128 - zero point) @ W^T) + bias``, rounded once."""
    rows, x, zero = x.shape[0], _bucketed(x), OFFSET + x_zero_point
    y = _unary()(x, x_scale, zero, weight, scale, zeros, bias, 1.0, 0, dtype, "none", [], "")
    return y if y.shape[0] == rows else y[:rows]


_EVERY = 16
"""Up to so many rows each count is multiplied as it is."""


def _bucketed(x: Tensor) -> Tensor:
    """Add rows to x ``(M, K)`` up to one of eight counts between powers of two: at most an eighth more.

    oneDNN compiles and keeps half a megabyte of code and tables per count: of all counts up to 1024 that is 0.5 GB.
    """
    rows = x.shape[0]
    if rows <= _EVERY:
        return x
    step = 1 << (rows - 1).bit_length() - 4
    return F.pad(x, (0, 0, 0, -rows % step)) if rows % step else x


def traced_product() -> Callable[..., Tensor]:
    """`int8_product` as the op ``qcore_torch::int8_product``, for graphs; to be asked for before tracing."""
    return op(int8_product, _fake_product)


def traced_codes() -> Callable[..., Tensor]:
    """`codes_of` as an op: a fake tensor cannot stand for the opaque weight where a graph unpacks it for gradients."""
    return op(codes_of, _fake_codes)


def _fake_codes(packed: Sequence[Tensor]) -> Tensor:
    rows = sum(int(weight.shape[0]) for weight in packed)
    return packed[0].new_empty(packed[0].shape[1], rows, dtype=torch.int8)


def _fake_product(x: Tensor, _weights: Sequence[Tensor], scale: Tensor, _zeros: Tensor) -> Tensor:
    return scale.new_empty(x.shape[0], scale.shape[1])


def _columns(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """The columns of each group, contiguous."""
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
