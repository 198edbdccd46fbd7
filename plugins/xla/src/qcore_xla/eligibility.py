"""Which requests a kernel supports, and why others are refused, in sentences that a user can act on."""

from __future__ import annotations

import torch

from qcore import FormatError
from qcore.plugin_api import (
    PLAIN,
    AnyRequest,
    Conv2dRequest,
    DynamicInt8,
    EmbeddingRequest,
    GroupedLinearRequest,
    LinearRequest,
    Scheme,
    StaticInt8,
    first_line,
    why_not_dtypes,
    why_not_empty,
)

from . import environment
from .aot import why_not_int8
from .engines import base


def why_not(request: AnyRequest) -> str:
    """Why a request is refused; empty if it is supported."""
    return (
        _why_not_device(request.device)
        or why_not_empty(request)
        or why_not_dtypes(request)
        or _why_not_scheme(request)
        or _why_not_int8(request)
    )


def scheme_text(request: LinearRequest | Conv2dRequest | GroupedLinearRequest) -> str:
    """The scheme of a request as text, which ops take; packed codes are in a layout of their own.

    Raises `FormatError` if no scheme combines this weight with these activations and results.
    """
    return str(Scheme(request.weight.with_layout(PLAIN), activation=request.activation, output=request.output))


def _why_not_scheme(request: AnyRequest) -> str:
    if isinstance(request, EmbeddingRequest):
        return ""
    try:
        scheme_text(request)
    except FormatError as error:
        return f"{first_line(error)} Torch ops run this layer."
    return ""


def _why_not_device(device: torch.device) -> str:
    engine = base.find(device.type)
    if engine is None:
        known = ", ".join(sorted(base.MODULES))
        return f"qcore-xla supports tensors on {known}, but these are on {device}; move them with .to('cpu')."
    return engine.why_not(device)


def _why_not_int8(request: AnyRequest) -> str:
    """Some TPU generations do not support int8 products."""
    quantized = isinstance(getattr(request, "activation", None), (DynamicInt8, StaticInt8))
    return why_not_int8(environment.tpu()) if quantized and request.device.type in {"tpu", "xla"} else ""
