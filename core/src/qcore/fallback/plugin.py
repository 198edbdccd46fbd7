"""The entry point of the built-in plugin: offers the kernels of the fallback for a request, best first."""

from __future__ import annotations

from functools import lru_cache

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
    int8pack = cpu_int8pack.kernel(request)
    if int8pack is not None:
        offers.insert(0, Offer(int8pack, FALLBACK + 15, "ATen int8 product; from 24 rows on dequantized in the cache"))
    int8 = cpu_int8.kernel(request) or cpu_w8a16.kernel(request)
    if int8 is not None:
        offers.insert(0, Offer(int8, FALLBACK + 10, "oneDNN int8 product, exact"))
    int4 = cpu_w4a16.kernel(request)
    if int4 is not None:
        offers.insert(0, Offer(int4, FALLBACK + 20, "ATen int4 product; from 80 rows on dequantized in the cache"))
    return tuple(offers)


@lru_cache(maxsize=1024)
def _conv2d(request: Conv2dRequest) -> tuple[Offer, ...]:
    plain = Offer(PlainConv2d(request), FALLBACK, _NOTE)
    fast = None if why_not_encoding(request) else cpu_conv2d.kernel(request)
    return (plain,) if fast is None else (Offer(fast, FALLBACK + 10, "oneDNN int8 convolution, exact"), plain)
