"""Which requests a kernel supports, and why others are refused, in sentences that a user can act on."""

from __future__ import annotations

import torch

from qcore import EmbeddingRequest
from qcore.plugin_api import AnyRequest, why_not_dtypes, why_not_empty, why_not_encoding

from . import environment
from .aot import why_not_int8
from .engines import base


def why_not(request: AnyRequest) -> str:
    """Why a request is refused; empty if it is supported."""
    return (
        _why_not_device(request.device)
        or why_not_empty(request)
        or why_not_encoding(request)
        or why_not_dtypes(request)
        or _why_not_int8(request)
    )


def _why_not_device(device: torch.device) -> str:
    engine = base.find(device.type)
    if engine is None:
        known = ", ".join(sorted(base.MODULES))
        return f"qcore-xla supports tensors on {known}, but these are on {device}; move them with .to('cpu')."
    return engine.why_not(device)


def _why_not_int8(request: AnyRequest) -> str:
    """Some TPU generations do not support int8 products."""
    quantized = not isinstance(request, EmbeddingRequest) and request.activation is not None
    return why_not_int8(environment.tpu()) if quantized and request.device.type in {"tpu", "xla"} else ""
