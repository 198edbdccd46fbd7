"""`linear` of one row, with what a model computes before and after it, in one step."""

from __future__ import annotations

import torch

from ..builder import Builder
from ..device import Buffer, Device
from ..layout import DeviceWeight
from . import selection
from .prepare import Activation
from .problem import GemmProblem
from .row_kernel import Around, RowGemv
from .rows import Rows, new_rows


def row_kernel(
    device: Device, weight: DeviceWeight, activation: Activation | None, coarse: bool, prologue: str, residual: bool
) -> RowGemv | None:
    """The kernel for a row of float32 that computes a prologue and adds a residual, if the product has one.

    ``coarse``: see `Rows`. None: it takes steps of their own.
    """
    problem = GemmProblem.of(activation, 1, weight.geometry, (torch.float32, torch.float32), coarse=coarse)
    found = selection.choose(device, problem)
    return found.around(device, weight.geometry, prologue, residual) if isinstance(found, RowGemv) else None


def row_linear(b: Builder, x: Rows, kernel: RowGemv, weight: DeviceWeight, bias: Buffer | None, around: Around) -> Rows:
    """``A(p(x)) @ W^T + bias + residual``, x ``(1, K)`` to ``(1, N)``, float32, by a kernel of `row_kernel`.

    ``bias``: float32 ``(N,)``; ``around``: p and the residual.
    """
    y = new_rows(b, 1, weight.geometry.n, torch.float32)
    for part in weight.parts:
        kernel.append(b, x, part, weight.geometry, bias, y, around)
    return y
