"""Products with float activations: which kernel, by the form of the call, and its launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from qcore_triton.weights import Weight

from .problem import Form, GemmProblem, float_problem, form_of
from .products.base import FloatProduct
from .runtime import replay
from .runtime.device import Device, device_of
from .selection import choose, choose_among


class FloatPlan(NamedTuple):
    """The plan for a form of call: the kernel and its configuration."""

    device: Device
    problem: GemmProblem
    product: FloatProduct[Any]
    config: Any


def linear(x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``x @ W^T + bias``: x ``(M, K)`` float32, bfloat16 or float16 of any strides, M >= 1, to ``(M, N)``.

    Products are accumulated in float32, the bias is added before the single rounding to ``out_dtype``.
    """
    device, problem, product, config = plan(x, weight, out_dtype)
    return product.launch(x, weight, bias, device, problem, config)


def plan(x: Tensor, weight: Weight, out_dtype: torch.dtype) -> FloatPlan:
    """The plan for a call, made once for each of its forms."""
    return _plan(x.device, x.dtype, out_dtype, x.shape[0], form_of(weight))


@lru_cache(maxsize=8192)
def _plan(where: torch.device, x_dtype: torch.dtype, out_dtype: torch.dtype, m: int, form: Form) -> FloatPlan:
    problem = float_problem(form, m, x_dtype, out_dtype)
    device = device_of(where)
    choice = choose(device, problem)
    return FloatPlan(device, problem, cast("FloatProduct[Any]", choice.product), choice.config)


def forget() -> None:
    """Select kernels again from now on: something has been measured."""
    choose.cache_clear()
    choose_among.cache_clear()
    _plan.cache_clear()
    replay.forget()
