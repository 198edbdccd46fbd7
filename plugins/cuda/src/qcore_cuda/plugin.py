"""The hooks of qcore-cuda.

qcore imports this module on every machine, also those without a GPU: Triton is imported when a kernel first runs.
"""

from __future__ import annotations

import qcore
from qcore.plugin_api import GroupedLinearRequest

from . import eligibility, probe

_NOTE = "Triton; the kernel depends on the number of rows"


@qcore.hookimpl
def qcore_probe() -> qcore.Available | qcore.Unavailable:
    """Whether there is a GPU that torch and Triton can use."""
    return probe.probe()


@qcore.hookimpl
def qcore_linear(request: qcore.LinearRequest) -> qcore.Offer | qcore.Refusal:
    """int4 and int8 weights with float or int8 activations."""
    reason = eligibility.why_not(request)
    if reason:
        return qcore.Refusal(reason)
    from .linear import kernel

    return qcore.Offer(kernel(request), qcore.NATIVE, _NOTE)


@qcore.hookimpl
def qcore_conv2d(request: qcore.Conv2dRequest) -> qcore.Offer | qcore.Refusal:
    """Convolutions with int4 and int8 weights; with int8 activations, those whose columns one program can quantize."""
    reason = eligibility.why_not(request)
    if reason:
        return qcore.Refusal(reason)
    from .conv2d import kernel, why_not

    reason = why_not(request)
    return qcore.Refusal(reason) if reason else qcore.Offer(kernel(request), qcore.NATIVE, "Triton")


@qcore.hookimpl
def qcore_embedding(request: qcore.EmbeddingRequest) -> qcore.Offer | qcore.Refusal:
    """Tables of int4 and int8 codes."""
    reason = eligibility.why_not(request)
    if reason:
        return qcore.Refusal(reason)
    from .embedding import CudaEmbedding

    return qcore.Offer(CudaEmbedding(request), qcore.NATIVE, "Triton; reads only the rows that are looked up")


@qcore.hookimpl
def qcore_grouped_linear(request: GroupedLinearRequest) -> qcore.Offer | qcore.Refusal:
    """Experts with int4 and int8 weights and float or int8 activations."""
    reason = eligibility.why_not(request)
    if reason:
        return qcore.Refusal(reason)
    from .grouped_linear import CudaGroupedLinear

    return qcore.Offer(CudaGroupedLinear(request), qcore.NATIVE, _NOTE)
