"""The hooks of qcore-cpu. qcore imports this module in every process; the probe loads the library."""

from __future__ import annotations

from functools import lru_cache

import torch

import qcore
from qcore.plugin_api import AnyRequest, GroupedLinearRequest, Kernel

from . import eligibility, native, probe, ranking

_NOTE = "int8 products of the digits of x and the weight's codes"
_TABLE_NOTE = "products of x and the numbers that the weight's codes stand for"


@qcore.hookimpl
def qcore_probe() -> qcore.Available | qcore.Unavailable:
    """Whether the native library can be used here."""
    return probe.probe()


@qcore.hookimpl
def qcore_linear(request: qcore.LinearRequest) -> qcore.Offer | qcore.Refusal:
    """Every weight with float or int8 activations."""
    return _answer(request)


@qcore.hookimpl
def qcore_conv2d(request: qcore.Conv2dRequest) -> qcore.Offer | qcore.Refusal:
    """Convolutions of int8 activations, and of float ones with enough channels in each group."""
    return _answer(request)


@qcore.hookimpl
def qcore_embedding(request: qcore.EmbeddingRequest) -> qcore.Offer | qcore.Refusal:
    """Tables of any element."""
    return _answer(request)


@qcore.hookimpl
def qcore_grouped_linear(request: GroupedLinearRequest) -> qcore.Offer | qcore.Refusal:
    """Experts with any weight that `qcore_linear` supports."""
    return _answer(request)


def _answer(request: AnyRequest) -> qcore.Offer | qcore.Refusal:
    if reason := native.fault() or eligibility.why_not(request):
        return qcore.Refusal(reason)
    rank, measured = ranking.rank(request, native.isa() or "", torch.get_num_threads())
    note = _NOTE if request.weight.element.is_integer else _TABLE_NOTE
    return qcore.Offer(_kernel(request), rank, measured or note)


@lru_cache(maxsize=1024)
def _kernel(request: AnyRequest) -> Kernel:
    if isinstance(request, qcore.LinearRequest):
        from .linear import CpuLinear

        return CpuLinear(request)
    if isinstance(request, qcore.Conv2dRequest):
        from .conv2d import CpuConv2d, CpuPlaneConv2d

        return CpuPlaneConv2d(request) if eligibility.takes_planes(request) else CpuConv2d(request)
    if isinstance(request, qcore.EmbeddingRequest):
        from .embedding import CpuEmbedding

        return CpuEmbedding(request)
    from .grouped_linear import CpuGroupedLinear

    return CpuGroupedLinear(request)
