"""The hooks of the plugin ``loopback``: linear, conv2d and embedding with integer weights, on CPU."""

import torch

import qcore
from qcore.plugin_api import why_not_encoding

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@qcore.hookimpl
def qcore_probe():
    return qcore.Available("loopback", "loopback 1.0", {"device": "cpu"})


@qcore.hookimpl
def qcore_linear(request):
    return _offer(request, "Linear")


@qcore.hookimpl
def qcore_conv2d(request):
    return _offer(request, "Conv2d")


@qcore.hookimpl
def qcore_embedding(request):
    return _offer(request, "Embedding")


def _offer(request, kind):
    if request.device.type != "cpu":
        return qcore.Refusal(f"loopback runs on the CPU; the tensors are on {request.device}.")
    if getattr(request, "x_dtype", torch.float32) not in (*_FLOATS, torch.int8):
        return qcore.Refusal(f"loopback takes float32, bfloat16, float16 or int8; x is {request.x_dtype}.")
    if reason := why_not_encoding(request):
        return qcore.Refusal(reason)
    from . import kernels

    # Honest: float64 products are slower than the fallback's.
    return qcore.Offer(getattr(kernels, kind)(request), qcore.FALLBACK - 100, "float64 torch ops")
