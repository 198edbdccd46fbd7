"""Which requests have a kernel here, and for the others why not, in a sentence that a user can act on."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import torch

from qcore import Conv2dRequest, EmbeddingRequest, LinearRequest, StaticInt8

from .packing import block_size
from .probe import triton_fault

Request: TypeAlias = LinearRequest | Conv2dRequest | EmbeddingRequest

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (8, 0)
"""The compute capability from which on tensor cores take bfloat16 and int8. Every AMD GPU in use is above it."""


def why_not(request: Request) -> str:
    """Why a request is refused; empty where it is served."""
    return why_not_device(request.device) or triton_fault() or _why_not_weight(request) or _why_not_dtypes(request)


@lru_cache(maxsize=64)
def why_not_device(device: torch.device) -> str:
    """Why tensors on ``device`` are not served; asks for its compute capability once."""
    if device.type != "cuda":
        return f"qcore-cuda runs on CUDA devices, and the tensors are on {device}; move them with .to('cuda')."
    try:
        found = torch.cuda.get_device_capability(device)
    except (RuntimeError, AssertionError) as error:
        return f"torch cannot use {device}: {str(error).splitlines()[0]}"
    if found < OLDEST:
        return (
            f"{device} has compute capability {found[0]}.{found[1]}; the kernels need {OLDEST[0]}.{OLDEST[1]} (Ampere) "
            f"or later. Its layers run on torch ops."
        )
    return ""


def _why_not_weight(request: Request) -> str:
    if request.n < 1 or request.k < 1:
        return f"a weight of shape {(request.n, request.k)} holds nothing to compute with; torch ops serve it."
    group = request.weight.group_size
    if not block_size(group):
        return f"group size {group} is no multiple of 32, which blocks of the packed weight need; use 32, 64 or 128."
    return ""


def _why_not_dtypes(request: Request) -> str:
    if isinstance(request, EmbeddingRequest):
        return _unless_float(request.out_dtype, "results")
    if request.output is None:
        reason = _unless_float(request.out_dtype, "results")
    elif request.activation is None:
        reason = "an int8 result goes with int8 activations here; use a scheme such as w8a8-o8."
    else:
        reason = (
            "" if request.out_dtype == torch.int8 else f"a result with OutputInt8 is int8, not {request.out_dtype}."
        )
    if request.x_dtype == torch.int8 and isinstance(request.activation, StaticInt8):
        return reason
    return reason or _unless_float(request.x_dtype, "activations")


def _unless_float(dtype: torch.dtype, what: str) -> str:
    if dtype in FLOATS:
        return ""
    name = str(dtype).removeprefix("torch.")
    return f"{what} of dtype {name} have no kernel here; use bfloat16, float16 or float32."
