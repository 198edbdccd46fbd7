"""``torch.ops.qcore_cuda.grouped_linear``: products of several experts as one op of a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qcore.plugin_api import contiguous
from qcore_triton.codes import given_of, mode_of
from qcore_triton.weights import check_devices

from .ops import define, device_guard, needs_guard
from .runtime.replay import replay_call

# ruff: noqa: ARG001 - a fake has the signature of its op


@lru_cache(maxsize=1)
def _product() -> Callable[..., Tensor]:
    from .grouped.product import grouped_linear as product

    return product


def grouped_linear(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, factor: Tensor | None,
    offsets: Tensor, n: int, k: int, bits: int, group: int, element: str, codes: bool, symmetric: bool,
    static_scale: float | None, static_zero_point: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Experts' products of x ``(T, K)``, T at least 1, to ``(T, N)``; ``offsets``: int32 ``(E,)``, ends of their rows.

    The weight's tensors are those of `ops.linear_a16` with a first dimension E; ``bias``: ``(E, N)``. ``codes``:
    whether activations are int8, quantized by the static parameters, or per row, ``symmetric`` or not.
    """
    check_devices(x, data, {"bias": bias, "offsets": offsets})
    if needs_guard(x):
        with device_guard(x):
            return grouped_linear(
                x, data, scale, zero, bias, factor, offsets, n, k, bits, group, element, codes, symmetric, static_scale,
                static_zero_point, out_dtype,
            )  # fmt: skip
    from .grouped.problem import Experts

    mode = mode_of(x, symmetric, given_of(None, None, static_scale, static_zero_point)) if codes else None
    experts = Experts(data, scale, zero, n, k, bits, group, element, factor)
    bias = None if bias is None else contiguous(bias)
    return _product()(x, experts, bias, contiguous(offsets), out_dtype, mode)


def _grouped_linear(x: Tensor, *rest: Any) -> Tensor:
    return replay_call(grouped_linear, (x, *rest[:6]), rest[6:]) if x.shape[0] else _fake(x, *rest)


def _fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, factor: Tensor | None,
    offsets: Tensor, n: int, *rest: Any,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], n), dtype=rest[-1])


op_grouped_linear = define(
    "grouped_linear(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? bias, Tensor? factor, Tensor offsets, "
    "int n, int k, int bits, int group, str element, bool codes, bool symmetric, "
    "float? static_scale, int static_zero_point, ScalarType out_dtype) -> Tensor",
    _grouped_linear,
    _fake,
)
