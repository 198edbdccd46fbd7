"""Quantized activations and their parameters; imports no Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcore import DynamicInt8, OutputInt8
from qcore.plugin_api import Activation, contiguous, given_numbers

SYMMETRIC, ASYMMETRIC, TENSOR, TOKEN = range(4)
"""Kinds of parameters, as in `kernels.quantize`: computed per token (2), or given for the whole tensor or per token."""


Numbers = tuple[bool, float | None, int, float | None, int]


def numbers_of(activation: Activation | None, output: OutputInt8 | None) -> Numbers:
    """A request's activation and output as plain arguments of an op.

    Whether activations are quantized symmetrically; their scale (None: not given) and zero point; the output's.
    """
    symmetric = isinstance(activation, DynamicInt8) and activation.symmetric
    return (symmetric, *given_numbers(activation), *given_numbers(output))


class Codes(NamedTuple):
    """Quantized activations: ``x = scale * (q - zero)``.

    **Fields:** ``q``: int8 (for some products float16, less the zero points) ``(M, KQ)``, KQ = K rounded up to 128, 0
    beyond K; ``scale``: float32 ``(M,)``; ``zero``: float32 ``(M,)`` of whole numbers, None for 0; ``total``: int32
    ``(M,)``, the sums of codes, if requested; ``order``: of the columns, as `Weight.order`.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor | None
    total: Tensor | None = None
    order: int = 0


class Given(NamedTuple):
    """Scale and zero point for quantizing activations or results: numbers, or tensors ``(M,)``."""

    scale: Tensor | float
    zero: Tensor | float


def given_of(scale: Tensor | None, zero: Tensor | None, number: float | None, zero_number: int) -> Given | None:
    """Tensors ``(M,)`` if passed with the call, else the scheme's numbers, else None."""
    if scale is not None:
        return Given(scale, torch.zeros_like(scale) if zero is None else zero)
    return None if number is None else Given(number, float(zero_number))


class Mode(NamedTuple):
    """The kind of parameters, and scale and zero point if they are given."""

    kind: int
    scale: Any
    zero: Any

    @property
    def has_zero(self) -> bool:
        """Whether codes have a zero point: all but symmetric ones, and those whose given zero point is the number 0."""
        return self.kind != SYMMETRIC and not (self.kind == TENSOR and self.zero == 0)


def mode_of(x: Tensor, symmetric: bool, given: Given | None) -> Mode:
    """How x is quantized: with parameters computed per token, ``symmetric`` or not, or with those of ``given``."""
    if given is None:
        return Mode(SYMMETRIC if symmetric else ASYMMETRIC, None, None)
    if isinstance(given.scale, Tensor):
        return Mode(TOKEN, flat(given.scale), flat(torch.as_tensor(given.zero, device=x.device)))
    return Mode(TENSOR, float(given.scale), float(given.zero))


def flat(parameter: Tensor) -> Tensor:
    """Parameters per token as kernels read them: contiguous."""
    return contiguous(parameter.reshape(-1))


def columns_of_codes(k: int) -> int:
    """KQ, the number of columns that codes of K values take."""
    return -(-k // 128) * 128
