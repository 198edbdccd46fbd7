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
    device: Device,
    weight: DeviceWeight,
    activation: Activation | None,
    coarse: bool,
    *,
    prologue: str = "",
    residual: bool = False,
    rotated: int | None = None,
) -> RowGemv | None:
    """The kernel for a row of float32 that computes what is around the product, see `RowGemv.around`.

    ``coarse``: see `Rows`. None: it takes steps of their own.
    """
    problem = GemmProblem.of(activation, 1, weight.geometry, (torch.float32, torch.float32), coarse=coarse)
    found = selection.choose(device, problem)
    if not isinstance(found, RowGemv) or (rotated is not None and len(weight.parts) > 1):
        return None
    return found.around(device, weight.geometry, prologue, residual, rotated)


def row_linear(b: Builder, x: Rows, kernel: RowGemv, weight: DeviceWeight, bias: Buffer | None, around: Around) -> Rows:
    """``A(p(x)) @ W^T + bias + residual``, x ``(1, K)`` to ``(1, N)``, float32, by a kernel of `row_kernel`.

    ``bias``: float32 ``(N,)``; ``around``: p, the residual and the place of heads.
    """
    heads = around.heads
    y = new_rows(b, 1, weight.geometry.n, torch.float32, None if heads is None else heads.out)
    for part in weight.parts:
        kernel.append(b, x, part, weight.geometry, bias, y, around)
    return y
