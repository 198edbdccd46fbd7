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

from .ops import op

OFFSET = 128
"""uint8 activations hold code + 128."""


@lru_cache(maxsize=4)
def is_exact(weight_bits: int) -> bool:
    """Whether the op is here and gets the most extreme codes of ``weight_bits`` right on this CPU."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_pointwise")):  # type: ignore[no-untyped-call]
        return False
    low, high = -(1 << (weight_bits - 1)), (1 << (weight_bits - 1)) - 1
    codes = torch.full((33, 200), high, dtype=torch.int8)
    codes[1::2] = low
    x = torch.full((3, 200), 255, dtype=torch.uint8)
    x[1] = 0
    expected = (x.double() - OFFSET) @ codes.double().t()
    return torch.equal(int8_product(x, [prepack(codes)], torch.ones(1, 33)).double(), expected)


def prepack(codes: Tensor) -> Tensor:
    """Codes ``(N, K)`` int8 as an opaque tensor in oneDNN's own layout."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(codes.contiguous(), None)
    return packed


def codes_of(packed: Tensor) -> Tensor:
    """The inverse of `prepack`, exact."""
    return packed.to_dense().t()


def int8_product(x: Tensor, weights: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Sum over groups of ``scale * ((x - 128) @ W^T)``.

    ``x``: uint8 ``(M, K)``; ``weights``: one prepacked tensor per group of K; ``scale``: float32 ``(G, N)``.
    The result is float32 ``(M, N)``: int32 accumulation within a group, float32 between groups.
    """
    none = _no_zero_points(scale.shape[1])
    parts = _columns(x, weights)
    y = _first(parts[0], weights[0], scale[0], none)
    for part, weight, s in zip(parts[1:], weights[1:], scale[1:], strict=True):
        end: tuple[object, ...] = (None, 1.0, 0, torch.float32, 1.0, 0, "sum", 1.0, "none", [], "")
        _binary()(part, 1.0, OFFSET, weight, s, none, y, *end)
    return y


def product_scaled(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """One group and one activation scale: ``x_scale * scale * ((x - 128 - zero point) @ W^T) + bias``, rounded once."""
    none, zero = _no_zero_points(scale.shape[0]), OFFSET + x_zero_point
    return _unary()(x, x_scale, zero, weight, scale, none, bias, 1.0, 0, dtype, "none", [], "")


def traced_product() -> Callable[..., Tensor]:
    """`int8_product` as the op ``qcore_torch::int8_product``, for graphs; to be asked for before tracing."""
    return op(int8_product, _fake_product)


def _fake_product(x: Tensor, weights: Sequence[Tensor], scale: Tensor) -> Tensor:
    del weights
    return scale.new_empty(x.shape[0], scale.shape[1])


def _columns(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """The columns of each group, contiguous."""
    groups = len(weights)
    if groups == 1:
        return (x.contiguous(),)
    if x.shape[1] % groups == 0 and weights[0].shape == weights[-1].shape:
        return x.view(x.shape[0], groups, -1).transpose(0, 1).contiguous().unbind()
    sizes = [int(w.shape[0]) for w in weights]
    return [part.contiguous() for part in torch.split(x, sizes, dim=1)]


def _first(x: Tensor, weight: Tensor, scale: Tensor, none: Tensor) -> Tensor:
    return _unary()(x, 1.0, OFFSET, weight, scale, none, None, 1.0, 0, torch.float32, "none", [], "")


@lru_cache(maxsize=1)
def _unary() -> Callable[..., Tensor]:
    return torch.ops.onednn.qlinear_pointwise.default


@lru_cache(maxsize=1)
def _binary() -> Callable[..., Tensor]:
    return torch.ops.onednn.qlinear_pointwise.binary


@lru_cache(maxsize=256)
def _no_zero_points(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int32)
