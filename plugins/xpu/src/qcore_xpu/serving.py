"""Which kernel serves a request, whatever device it is for: `plugin` has looked at that."""

from __future__ import annotations

from qcore import NATIVE, Conv2dRequest, EmbeddingRequest, LinearRequest, Offer, Refusal

from . import eligibility


def linear(request: LinearRequest) -> Offer | Refusal:
    """The kernel for a linear layer, or why there is none."""
    reason = eligibility.why_not(request)
    if reason:
        return Refusal(reason)
    from . import linear as aten
    from . import triton_linear

    # ATen's ops first: oneDNN's kernels are tuned for these GPUs, ours for none yet.
    first = aten.kernel(request)
    if first is not None and not isinstance(first, str):
        return Offer(first, NATIVE, first.note)
    made = triton_linear.kernel(request)
    if isinstance(made, str):
        return Refusal(f"{first} {made}" if first else made)
    return Offer(made, NATIVE, f"{made.note}; {first}" if first else made.note)


def conv2d(request: Conv2dRequest) -> Offer | Refusal:
    """The kernel for a convolution, or why there is none."""
    reason = eligibility.why_not(request)
    if reason:
        return Refusal(reason)
    from .conv2d import kernel

    made = kernel(request)
    return Refusal(made) if isinstance(made, str) else Offer(made, NATIVE, made.note)


def embedding(request: EmbeddingRequest) -> Offer | Refusal:
    """The kernel for a table, or why there is none."""
    reason = eligibility.why_not(request)
    if reason:
        return Refusal(reason)
    from .embedding import kernel

    made = kernel(request)
    return Refusal(made) if isinstance(made, str) else Offer(made, NATIVE, made.note)
