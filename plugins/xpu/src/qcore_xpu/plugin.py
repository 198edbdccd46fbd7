"""The hooks of qcore-xpu.

qcore imports this module on every machine, including those without an Intel GPU: Triton is imported when one of its
kernels first runs.
"""

from __future__ import annotations

import qcore

from . import eligibility, probe, serving


@qcore.hookimpl
def qcore_probe() -> qcore.Available | qcore.Unavailable:
    """Whether there is an Intel GPU that torch can use."""
    return probe.probe()


@qcore.hookimpl
def qcore_linear(request: qcore.LinearRequest) -> qcore.Offer | qcore.Refusal:
    """int4 and int8 weights with float or int8 activations."""
    reason = eligibility.why_not_device(request.device) or serving.why_not_linear(request)
    return qcore.Refusal(reason) if reason else serving.linear(request)


@qcore.hookimpl
def qcore_conv2d(request: qcore.Conv2dRequest) -> qcore.Offer | qcore.Refusal:
    """Convolutions over quantized columns, or with a dequantized weight."""
    reason = eligibility.why_not_device(request.device) or serving.why_not_conv2d(request)
    return qcore.Refusal(reason) if reason else serving.conv2d(request)


@qcore.hookimpl
def qcore_embedding(request: qcore.EmbeddingRequest) -> qcore.Offer | qcore.Refusal:
    """Tables of int4 and int8 codes."""
    reason = eligibility.why_not_device(request.device) or serving.why_not_embedding(request)
    return qcore.Refusal(reason) if reason else serving.embedding(request)
