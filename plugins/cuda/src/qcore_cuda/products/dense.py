"""`DENSE`: the weight is dequantized, torch multiplies; for many rows if no kernel is faster.

Also for float32 activations and tables of numbers that have more digits than 16-bit floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qcore_triton import host
from qcore_triton.weights import Weight

from ..costs import Work
from ..problem import GemmProblem
from ..runtime.device import Device
from ..runtime.launch import launch
from ..runtime.replay import empty
from .aligned import copied, copies_of_result, copies_of_x, finished, padded
from .base import FloatProduct

_LINES = 8
"""Values of 16 bits in 16 bytes."""


class Whole(NamedTuple):
    """There is nothing to configure."""


def dequantized(weight: Weight, dtype: torch.dtype, multiple: int = 1) -> Tensor:
    """The dequantized weight ``(N, K)``, both rounded up to a ``multiple``: computed in float32, rounded once."""
    return host.dense(launch, empty, weight, dtype, multiple=multiple, num_warps=4)


def product_of(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``x @ w^T + bias`` by torch, x ``(M, K)`` and w ``(N, K)`` of one dtype; rounded once to ``out_dtype``."""
    if x.dtype == torch.float32:
        return F.linear(x, w, None if bias is None else bias.float()).to(out_dtype)
    if (bias is None or bias.dtype == x.dtype) and out_dtype == x.dtype:
        return F.linear(x, w, bias)
    y = torch.mm(x, w.t(), out_dtype=torch.float32)
    return (y if bias is None else y + bias.float()).to(out_dtype)


class Dense(FloatProduct[Whole]):
    """See `qcore_triton.kernels.dequant`."""

    name: ClassVar[str] = "dense"
    config = Whole

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        del device
        return (problem.narrow and not (problem.exact or problem.alike)) or _alone(problem)

    def rule(self, device: Device, problem: GemmProblem) -> Whole | None:
        del device
        return Whole() if problem.rows >= 1024 or _alone(problem) else None

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Whole]:
        del device
        if problem.rows >= 64 or _alone(problem):
            yield Whole()

    def work(self, device: Device, problem: GemmProblem, config: Whole) -> Work:
        del problem, config
        return Work(device.sms, 1)

    def copies(self, problem: GemmProblem) -> tuple[int, ...]:
        return copies_of_x(problem, _LINES) + copies_of_result(problem)

    def launch(
        self, x: Tensor, weight: Weight, bias: Tensor | None, device: Device, problem: GemmProblem, config: Whole
    ) -> Tensor:
        del config
        n, w = problem.n, dequantized(weight, x.dtype, _LINES)
        # The library's products take several times as long if rows do not begin on 16 bytes.
        x = x if w.shape[1] == x.shape[1] else copied(x, w.shape[1], device)
        return finished(product_of(x, w, padded(bias, len(w), device), problem.out_dtype), n, device)


def _alone(problem: GemmProblem) -> bool:
    """Whether no other product has numbers as exact as float32 activations need."""
    return not problem.narrow and problem.rounded


DENSE = Dense()
