"""Which requests have a kernel here, and for the others why not, in a sentence that a user can act on."""

from __future__ import annotations

from typing import TypeAlias

import torch

from qcore import Conv2dRequest, EmbeddingRequest, LinearRequest, StaticInt8

from . import environment
from .aot import why_not_int8
from .engines import base

Request: TypeAlias = LinearRequest | Conv2dRequest | EmbeddingRequest

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def why_not(request: Request) -> str:
    """Why a request is refused; empty where it is served."""
    return (
        _why_not_device(request.device)
        or _why_not_weight(request)
        or _why_not_dtypes(request)
        or _why_not_int8(request)
    )


def _why_not_device(device: torch.device) -> str:
    engine = base.find(device.type)
    if engine is None:
        known = ", ".join(sorted(base.MODULES))
        return f"qcore-xla serves tensors on {known}, and these are on {device}; move them with .to('cpu')."
    return engine.serves(device)


def _why_not_int8(request: Request) -> str:
    """Some generations of TPUs have no int8 products."""
    quantized = not isinstance(request, EmbeddingRequest) and request.activation is not None
    return why_not_int8(environment.tpu()) if quantized and request.device.type in {"tpu", "xla"} else ""


def _why_not_weight(request: Request) -> str:
    if request.n < 1 or request.k < 1:
        return f"a weight of shape {(request.n, request.k)} holds nothing to compute with; torch ops serve it."
    return ""


def _why_not_dtypes(request: Request) -> str:
    if isinstance(request, EmbeddingRequest):
        return _unless_float(request.out_dtype, "results")
    if request.output is None:
        reason = _unless_float(request.out_dtype, "results")
    elif request.activation is None:
        reason = "an int8 result goes with int8 activations here; use a scheme such as w8a8-o8."
    else:
        fits = request.out_dtype == torch.int8
        reason = "" if fits else f"a result with OutputInt8 is int8, not {request.out_dtype}."
    if request.x_dtype == torch.int8 and isinstance(request.activation, StaticInt8):
        return reason
    return reason or _unless_float(request.x_dtype, "activations")


def _unless_float(dtype: torch.dtype, what: str) -> str:
    if dtype in FLOATS:
        return ""
    name = str(dtype).removeprefix("torch.")
    return f"{what} of dtype {name} have no kernel here; use bfloat16, float16 or float32."
