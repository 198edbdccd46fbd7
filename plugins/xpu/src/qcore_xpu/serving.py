"""The choice of a kernel for a request, regardless of its device: `plugin` checks the device.

For each contract there are two functions: ``why_not_*`` returns the reason for a refusal, or an empty string, and the
other one makes the offer for a request that is not refused.
"""

from __future__ import annotations

from qcore import NATIVE, Conv2dRequest, EmbeddingRequest, LinearRequest, Offer

from . import eligibility


def why_not_linear(request: LinearRequest) -> str:
    """Why there is no kernel for a linear layer; empty if there is one."""
    if reason := eligibility.why_not(request):
        return reason
    from . import linear as aten
    from . import triton_linear

    if not aten.has_op(request):
        return triton_linear.why_not(request)
    first = aten.why_not(request)
    second = triton_linear.why_not(request) if first else ""
    return f"{first} {second}" if second else ""


def linear(request: LinearRequest) -> Offer:
    """The kernel for a linear layer."""
    from . import linear as aten
    from . import triton_linear

    # ATen's ops first: oneDNN's kernels are tuned for these GPUs, ours are not tuned yet.
    reason = aten.why_not(request)
    if not reason:
        made = aten.kernel(request)
        return Offer(made, NATIVE, made.note)
    second = triton_linear.kernel(request)
    return Offer(second, NATIVE, f"{second.note}; {reason}" if aten.has_op(request) else second.note)


def why_not_conv2d(request: Conv2dRequest) -> str:
    """Why there is no kernel for a convolution; empty if there is one."""
    if reason := eligibility.why_not(request):
        return reason
    from .conv2d import why_not

    return why_not(request)


def conv2d(request: Conv2dRequest) -> Offer:
    """The kernel for a convolution."""
    from .conv2d import kernel

    made = kernel(request)
    return Offer(made, NATIVE, made.note)


def why_not_embedding(request: EmbeddingRequest) -> str:
    """Why there is no kernel for a table; empty if there is one."""
    if reason := eligibility.why_not(request):
        return reason
    from .embedding import why_not

    return why_not(request)


def embedding(request: EmbeddingRequest) -> Offer:
    """The kernel for a table."""
    from .embedding import kernel

    made = kernel(request)
    return Offer(made, NATIVE, made.note)
