"""Why requests are refused, in sentences that a user can act on."""

from __future__ import annotations

from functools import lru_cache

import torch

from qcore.plugin_api import AnyRequest, why_not_dtypes, why_not_empty, why_not_encoding


def why_not(request: AnyRequest) -> str:
    """Why a request is refused, regardless of its device; empty if a kernel may support it."""
    return why_not_empty(request) or why_not_encoding(request) or why_not_dtypes(request)


@lru_cache(maxsize=64)
def why_not_device(device: torch.device) -> str:
    """Why tensors on ``device`` are not supported, or empty."""
    if device.type != "xpu":
        return f"qcore-xpu runs on XPU devices, but the tensors are on {device}; move them with .to('xpu')."
    return ""
