"""The entry point of the built-in plugin: offers the kernels of the fallback for a request, best first."""

from __future__ import annotations

import logging
from functools import lru_cache
from types import ModuleType

import torch

from ..contracts import Conv2dRequest, EmbeddingRequest, GroupedLinearRequest, LinearRequest
from ..contracts.refusals import why_not_encoding
from ..discovery.hookspecs import hookimpl
from ..discovery.kernels import FALLBACK, Available, Offer
from . import cpu_conv2d, cpu_int8, cpu_int8pack, cpu_w4a16, cpu_w8a16
from .embedding import PlainEmbedding
from .grouped_linear import PlainGroupedLinear
from .plain_conv2d import PlainConv2d
from .plain_linear import PlainLinear

_NOTE = "plain torch ops"
_LOG = logging.getLogger(__name__)
"""A hook answers with offers or with one refusal, so the reasons of single kernels are logged, at level DEBUG."""


@hookimpl
def qcore_probe() -> Available:
    """Always available: torch itself is the device's driver."""
    capability = torch.backends.cpu.get_cpu_capability()
    return Available(f"any torch device; CPU {capability}", f"torch {torch.__version__}, CPU {capability}")


@hookimpl
def qcore_linear(request: LinearRequest) -> list[Offer]:
    """Offer the fast CPU kernels that support the request, then plain torch ops."""
    return list(_linear(request))


@hookimpl
def qcore_conv2d(request: Conv2dRequest) -> list[Offer]:
    """Offer oneDNN's int8 convolution if it supports the request, then plain torch ops."""
    return list(_conv2d(request))


@hookimpl
def qcore_embedding(request: EmbeddingRequest) -> list[Offer]:
    """Offer plain torch ops."""
    return [Offer(PlainEmbedding(request), FALLBACK, _NOTE)]


@hookimpl
def qcore_grouped_linear(request: GroupedLinearRequest) -> list[Offer]:
    """Offer plain torch ops, which run expert by expert."""
    return [Offer(PlainGroupedLinear(request), FALLBACK, _NOTE)]


@lru_cache(maxsize=1024)
def _linear(request: LinearRequest) -> tuple[Offer, ...]:
    offers = [Offer(PlainLinear(request), FALLBACK, _NOTE)]
    if why_not_encoding(request):  # the other kernels support integer codes only
        return tuple(offers)
    if _supports(cpu_int8pack, request):
        note = "ATen int8 product; from 24 rows on dequantized in the cache"
        offers.insert(0, Offer(cpu_int8pack.kernel(request), FALLBACK + 15, note))
    for module in (cpu_int8, cpu_w8a16):  # one needs int8 activations, the other float ones
        if _supports(module, request):
            offers.insert(0, Offer(module.kernel(request), FALLBACK + 10, "oneDNN int8 product, exact"))
    if _supports(cpu_w4a16, request):
        note = "ATen int4 product; from 80 rows on dequantized in the cache"
        offers.insert(0, Offer(cpu_w4a16.kernel(request), FALLBACK + 20, note))
    return tuple(offers)


@lru_cache(maxsize=1024)
def _conv2d(request: Conv2dRequest) -> tuple[Offer, ...]:
    plain = Offer(PlainConv2d(request), FALLBACK, _NOTE)
    if why_not_encoding(request) or not _supports(cpu_conv2d, request):
        return (plain,)
    return Offer(cpu_conv2d.kernel(request), FALLBACK + 10, "oneDNN int8 convolution, exact"), plain


def _supports(module: ModuleType, request: LinearRequest | Conv2dRequest) -> bool:
    """Whether the kernel of a module supports a request; logs why not."""
    reason = module.why_not(request)
    if reason:
        _LOG.debug("%s is not offered: %s; %s", module.__name__.rpartition(".")[2], reason, request)
    return not reason
