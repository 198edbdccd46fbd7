"""Reasons for refusing a request that are common to plugins with kernels in bfloat16, float16 and float32."""

from __future__ import annotations

from typing import TypeAlias

import torch

from ..errors import dtype_name
from ..formats import ScaleType
from ..weights.activations import DynamicFP8, StaticFP8, StaticInt8
from .conv2d import Conv2dRequest
from .embedding import EmbeddingRequest
from .grouped import GroupedLinearRequest
from .linear import LinearRequest

AnyRequest: TypeAlias = LinearRequest | Conv2dRequest | EmbeddingRequest | GroupedLinearRequest

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of activations and results that kernels usually support."""


def why_not_empty(request: AnyRequest) -> str:
    """Why a weight without elements is refused; empty for any other."""
    if request.n < 1 or request.k < 1:
        return f"a weight of shape {(request.n, request.k)} is empty: there is nothing to compute; torch ops run it."
    return ""


def why_not_encoding(request: AnyRequest, elements: tuple[str, ...] = ("int4", "int8")) -> str:
    """Why a request is refused for the element of its weight, the type of its scales, or fp8 activations.

    For plugins whose kernels support ``elements`` with float scales: the set of elements is open, plugins can add new
    ones. Empty if there is no reason to refuse the request.
    """
    weight = request.weight
    if weight.dtype not in elements:
        return f"{weight.dtype} weights have no kernel here (only {' and '.join(elements)}); torch ops run this layer."
    if weight.scale is not ScaleType.FLOAT:
        return f"scales of type {weight.scale.value} have no kernel here; torch ops run this layer."
    if isinstance(getattr(request, "activation", None), (DynamicFP8, StaticFP8)):
        return "fp8 activations have no kernel here; torch ops run this layer."
    return ""


def why_not_dtypes(request: AnyRequest) -> str:
    """Why activations or results are refused that are neither one of `FLOATS` nor int8 as the scheme specifies.

    Empty if a kernel for `FLOATS` supports the request.
    """
    if isinstance(request, EmbeddingRequest):
        return _unless_float(request.out_dtype, "results")
    reason = _why_not_result(request)
    if request.x_dtype == torch.int8 and isinstance(request.activation, StaticInt8):
        return reason
    return reason or _unless_float(request.x_dtype, "activations")


def _why_not_result(request: LinearRequest | Conv2dRequest | GroupedLinearRequest) -> str:
    if request.output is None:
        return _unless_float(request.out_dtype, "results")
    if request.activation is None:
        return "an int8 result requires int8 activations here; use a scheme such as w8a8-o8."
    if request.out_dtype != torch.int8:
        return f"a result with OutputInt8 is int8, not {request.out_dtype}."
    return ""


def _unless_float(dtype: torch.dtype, what: str) -> str:
    if dtype in FLOATS:
        return ""
    name = dtype_name(dtype)
    return f"{what} of dtype {name} have no kernel here; use bfloat16, float16 or float32."
