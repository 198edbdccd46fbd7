"""The hooks of qcore-vulkan.

qcore imports this module on every machine, including those without Vulkan: the native library is loaded by the probe.
"""

from __future__ import annotations

import qcore
from qcore.plugin_api import GroupedLinearRequest

from . import eligibility, probe

_NOTE = "Vulkan; the number of rows selects the kernel"


@qcore.hookimpl
def qcore_probe() -> qcore.Available | qcore.Unavailable:
    """Whether a device with a Vulkan driver has the features that the shaders need."""
    return probe.probe()


@qcore.hookimpl
def qcore_linear(request: qcore.LinearRequest) -> qcore.Offer | qcore.Refusal:
    """int4 and int8 weights with float or int8 activations."""
    reason = eligibility.why_not(request)
    if reason:
        return qcore.Refusal(reason)
    from .linear import VulkanLinear

    return qcore.Offer(VulkanLinear(request), probe.rank(), _NOTE)


@qcore.hookimpl
def qcore_conv2d(request: qcore.Conv2dRequest) -> qcore.Offer | qcore.Refusal:
    """Convolutions as products of columns that the device gathers."""
    reason = eligibility.why_not(request)
    if reason:
        return qcore.Refusal(reason)
    from .conv2d import VulkanConv2d

    return qcore.Offer(VulkanConv2d(request), probe.rank(), _NOTE)


@qcore.hookimpl
def qcore_embedding(request: qcore.EmbeddingRequest) -> qcore.Offer | qcore.Refusal:
    """Tables of int4 and int8 codes."""
    reason = eligibility.why_not(request)
    if reason:
        return qcore.Refusal(reason)
    from .embedding import VulkanEmbedding

    return qcore.Offer(VulkanEmbedding(request), probe.rank(), "Vulkan; reads only the requested rows")


@qcore.hookimpl
def qcore_grouped_linear(request: GroupedLinearRequest) -> qcore.Offer | qcore.Refusal:
    """Experts with any weight that `qcore_linear` supports."""
    reason = eligibility.why_not(request)
    if reason:
        return qcore.Refusal(reason)
    from .grouped_linear import VulkanGroupedLinear

    return qcore.Offer(VulkanGroupedLinear(request), probe.rank(), "Vulkan; all experts in one product")
