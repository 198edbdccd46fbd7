"""Why requests are refused, in sentences that a user can act on."""

from __future__ import annotations

from functools import lru_cache

import torch

from qcore import DynamicFP8, FormatError, LinearRequest, ScaleType, StaticFP8
from qcore.plugin_api import (
    AnyRequest,
    Conv2dRequest,
    DynamicInt8,
    Format,
    GroupedLinearRequest,
    StaticInt8,
    first_line,
    why_not_dtypes,
    why_not_empty,
    why_not_encoding,
)
from qcore_triton.packing import element_text, why_not_group

from .probe import triton_fault

OLDEST = (8, 0)
"""The lowest compute capability whose tensor cores support bfloat16 and int8. AMD GPUs report higher ones."""


_LARGEST_GROUP = 512
"""Of those that no block holds: a program holds whole groups of some rows."""


def why_not(request: AnyRequest) -> str:
    """Why a request is refused; empty if it is supported."""
    return why_not_device(request.device) or triton_fault() or _why_not_weight(request) or why_not_dtypes(request)


@lru_cache(maxsize=64)
def why_not_device(device: torch.device) -> str:
    """Why tensors on ``device`` are not supported, or empty; cached, since it reads the compute capability."""
    if device.type != "cuda":
        return f"qcore-cuda runs on CUDA devices, but the tensors are on {device}; move them with .to('cuda')."
    try:
        found = torch.cuda.get_device_capability(device)
    except (RuntimeError, AssertionError) as error:
        return f"torch cannot use {device}: {first_line(error)}"
    if found < OLDEST:
        return (
            f"{device} has compute capability {found[0]}.{found[1]}; the kernels need {OLDEST[0]}.{OLDEST[1]} (Ampere) "
            f"or later. Its layers run on torch ops."
        )
    return ""


def _why_not_weight(request: AnyRequest) -> str:
    group = "" if takes_any_group(request) else why_not_group(request.weight)
    return why_not_empty(request) or _why_not_encoding(request) or group


def takes_any_group(request: AnyRequest) -> bool:
    """Whether a request is for `any_group`: float activations of a linear layer, and groups that blocks cannot hold."""
    if not isinstance(request, LinearRequest) or request.activation is not None:
        return False
    weight = request.weight
    even = weight.group_size is not None and weight.group_size % 2 == 0 and weight.group_size <= _LARGEST_GROUP
    return even and weight.scale is ScaleType.FLOAT and bool(why_not_group(weight))


def _why_not_encoding(request: AnyRequest) -> str:
    """Why an element, its scales or activations have no kernel: tables have some with float activations, at least."""
    weight, activation = request.weight, getattr(request, "activation", None)
    tables = not weight.element.is_integer or isinstance(activation, (DynamicFP8, StaticFP8))
    if not tables or (isinstance(request, Conv2dRequest) and activation is not None):
        return why_not_encoding(request)
    if isinstance(request, GroupedLinearRequest) and (activation or request.x_dtype == torch.float32):
        return "experts with tables have no kernel for float32, int8 or fp8 activations; use 16-bit floats (a16)."
    if isinstance(activation, (DynamicInt8, StaticInt8)):
        return f"{weight.dtype} weights have no kernel with int8 activations; use fp8 ones, or float ones (a16)."
    return _why_not_element(weight)


def _why_not_element(weight: Format) -> str:
    if weight.element.is_integer and weight.dtype not in ("int4", "int8"):
        return f"{weight.dtype} weights have no kernel here (only int4 and int8); torch ops run this layer."
    try:
        element_text(weight)
    except FormatError as error:
        return f"{first_line(error)} Torch ops run this layer."
    return ""
