"""Products with int8 activations: quantize x, multiply codes, apply the epilogue. The form of call selects a kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from qcore_triton.codes import Codes, Given, Mode, mode_of
from qcore_triton.host import blocking
from qcore_triton.weights import NO_ZERO, Weight, pitch_of

from .problem import Form, GemmProblem, form_of, int8_problem
from .products.aligned import finished, padded
from .products.base import Choice, Int8Product, Operands
from .products.quantized import codes_of
from .runtime import replay
from .runtime.device import Device, device_of
from .runtime.replay import empty
from .selection import choose


class Int8Plan(NamedTuple):
    """The plan for a form of call: the kernel and its configuration.

    ``totals``: whether the quantizing kernel also computes the sum of codes of each row.
    """

    device: Device
    problem: GemmProblem
    product: Int8Product[Any]
    config: Any
    totals: bool


def product(
    x: Tensor,
    weight: Weight,
    sums: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    symmetric: bool = True,
    given: Given | None = None,
    out: Given | None = None,
) -> Tensor:
    """Quantize x ``(M, K)``, M >= 1, multiply, and apply the epilogue: ``(M, N)`` of ``out_dtype``.

    Each token is quantized by parameters of its own, ``symmetric`` or not, or as ``given`` says; an int8 x holds
    codes already. ``sums``: see `Operands`. ``out``: scale and zero point of int8 results.
    """
    mode = mode_of(x, symmetric, given)
    plan = plan_of(x, weight, out_dtype, mode.has_zero, out)
    return run(x, mode, Operands(weight, sums, bias, out), plan)


def run(x: Tensor, mode: Mode, operands: Operands, plan: Int8Plan) -> Tensor:
    """`product` by a plan. A single row is quantized by the kernel that multiplies it, if that is supported."""
    device, problem, kernel, config, totals = plan
    if kernel.fuses(x, device, problem):
        return kernel.launch_floats(x, mode, operands, device, problem, config)
    codes = codes_of(x, mode, totals, kernel.order(operands.weight), device, kernel.codes)
    return _multiply(codes, operands, plan)


def _multiply(codes: Codes, operands: Operands, plan: Int8Plan) -> Tensor:
    """The product of codes by a plan."""
    device, problem, kernel, config, _ = plan
    n, (weight, _, bias, _) = problem.n, operands
    if not kernel.pads(problem):
        return kernel.launch(codes, operands, device, problem, config)
    wide = pitch_of(n)
    operands = operands._replace(weight=weight._replace(n=wide), bias=padded(bias, wide, device))
    return finished(kernel.launch(codes, operands, device, replace(problem, n=wide), config), n, device)


def plan_of(
    x: Tensor, weight: Weight, out_dtype: torch.dtype, x_zero: bool, out: Given | None, *, own_order: bool = False
) -> Int8Plan:
    """The plan for a call, made once for each of its forms; ``x_zero``: activations have a zero point."""
    by_token = out is not None and isinstance(out.scale, Tensor)
    return _plan(x.device, x.shape[0], form_of(weight), out_dtype, x_zero, by_token, own_order)


@lru_cache(maxsize=8192)
def _plan(
    where: torch.device, m: int, form: Form, out_dtype: torch.dtype, x_zero: bool, by_token: bool, own_order: bool
) -> Int8Plan:
    problem = int8_problem(
        form, m, out_dtype, blocking(form.weight()), x_zero=x_zero, out_by_token=by_token, own_order=own_order
    )
    device = device_of(where)
    return planned(device, problem, choose(device, problem))


def planned(device: Device, problem: GemmProblem, choice: Choice) -> Int8Plan:
    """A plan with a given choice."""
    # A zero point per channel is multiplied by the sum of a whole row of codes, a by-product of quantizing.
    product = cast("Int8Product[Any]", choice.product)
    totals = product.wants_totals and problem.zero != NO_ZERO and problem.one_group
    return Int8Plan(device, problem, product, choice.config, totals)


def linear(
    codes: Codes, weight: Weight, sums: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype, out: Given | None
) -> Tensor:
    """``(M, N)`` of ``out_dtype``: codes, in the weight's own order, times a packed weight; see `product`."""
    if not codes.q.shape[0] or not weight.n:
        return empty((codes.q.shape[0], weight.n), out_dtype, codes.q.device)
    plan = plan_of(codes.q, weight, out_dtype, codes.zero is not None, out, own_order=True)
    return _multiply(codes, Operands(weight, sums, bias, out), plan)


def forget() -> None:
    """Clear the cached plans, so that kernels are selected again: new measurements exist."""
    choose.cache_clear()
    _plan.cache_clear()
    replay.forget()
