"""The hooks of the stand-in: requests for the CPU, served by qcore-xpu's own choice of kernels."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import qcore

NAME = "xpu_stand_in"


@qcore.hookimpl
def qcore_probe() -> qcore.Available | qcore.Unavailable:
    """Always here, as long as Triton interprets: its kernels cannot be compiled for a CPU."""
    triton = sys.modules.get("triton")
    interprets = os.environ.get("TRITON_INTERPRET") == "1" if triton is None else triton.knobs.runtime.interpret
    if not interprets:
        return qcore.Unavailable("set TRITON_INTERPRET=1 before Triton is imported: the stand-in interprets kernels.")
    return qcore.Available("no device: a stand-in for XPU ops on the CPU", details={"device": "cpu"})


@qcore.hookimpl
def qcore_linear(request: qcore.LinearRequest) -> qcore.Offer | qcore.Refusal:
    """What qcore-xpu offers."""
    return _served(request, "linear")


@qcore.hookimpl
def qcore_conv2d(request: qcore.Conv2dRequest) -> qcore.Offer | qcore.Refusal:
    """What qcore-xpu offers."""
    return _served(request, "conv2d")


@qcore.hookimpl
def qcore_embedding(request: qcore.EmbeddingRequest) -> qcore.Offer | qcore.Refusal:
    """What qcore-xpu offers."""
    return _served(request, "embedding")


def _served(request: Any, contract: str) -> qcore.Offer | qcore.Refusal:
    if request.device.type != "cpu":
        return qcore.Refusal(f"the stand-in runs on the CPU, and the tensors are on {request.device}.")
    from qcore_xpu import serving

    from .replacing import replace_device

    replace_device()
    why_not: Callable[[Any], str] = getattr(serving, f"why_not_{contract}")
    if reason := why_not(request):
        return qcore.Refusal(reason)
    offer: Callable[[Any], qcore.Offer] = getattr(serving, contract)
    answer = offer(request)
    kernel = answer.kernel
    kernel.name = kernel.name.replace("xpu.", f"{NAME}.", 1)
    return qcore.Offer(kernel, qcore.EMULATED, answer.note)
