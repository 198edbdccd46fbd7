"""The hooks of qcore-xla.

qcore imports this module on every machine: JAX is imported when a kernel first runs.
"""

from __future__ import annotations

import qcore
from qcore.plugin_api import GroupedLinearRequest

from . import eligibility, probe

_NOTE = "XLA; compiled for each power of two of rows"


@qcore.hookimpl
def qcore_probe() -> qcore.Available | qcore.Unavailable:
    """Whether JAX is installed, and which devices it has."""
    return probe.probe()


@qcore.hookimpl
def qcore_linear(request: qcore.LinearRequest) -> qcore.Offer | qcore.Refusal:
    """Weights of 4 and 8 bits with float, int8 or fp8 activations."""
    reason = eligibility.why_not(request)
    if reason:
        return qcore.Refusal(reason)
    from .kernels.linear import XlaLinear

    return qcore.Offer(XlaLinear(request), probe.rank(request.device.type), _NOTE)


@qcore.hookimpl
def qcore_conv2d(request: qcore.Conv2dRequest) -> qcore.Offer | qcore.Refusal:
    """Convolutions as products of columns."""
    reason = eligibility.why_not(request)
    if reason:
        return qcore.Refusal(reason)
    from .kernels.conv2d import XlaConv2d

    return qcore.Offer(XlaConv2d(request), probe.rank(request.device.type), _NOTE)


@qcore.hookimpl
def qcore_embedding(request: qcore.EmbeddingRequest) -> qcore.Offer | qcore.Refusal:
    """Tables of codes of 4 and 8 bits."""
    reason = eligibility.why_not(request)
    if reason:
        return qcore.Refusal(reason)
    from .kernels.embedding import XlaEmbedding

    return qcore.Offer(XlaEmbedding(request), probe.rank(request.device.type), "XLA; reads only the requested rows")


@qcore.hookimpl
def qcore_grouped_linear(request: GroupedLinearRequest) -> qcore.Offer | qcore.Refusal:
    """Mixtures of experts, all of them in one program."""
    reason = eligibility.why_not(request)
    if reason:
        return qcore.Refusal(reason)
    from .kernels.grouped_linear import XlaGroupedLinear

    return qcore.Offer(XlaGroupedLinear(request), probe.rank(request.device.type), _NOTE)
