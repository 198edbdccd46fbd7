"""Convolutions with int8 activations: the choice of a kernel."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from qcore_triton import host
from qcore_triton.geometry import Geometry
from qcore_triton.weights import Weight

from .convolutions.base import ActivationParameters, ConvCall, Result
from .convolutions.catalog import CONVOLUTIONS
from .runtime.device import device_of


def conv2d(
    x: Tensor,
    weight: Weight,
    sums: Tensor | None,
    bias: Tensor | None,
    geometry: Geometry,
    activation: ActivationParameters,
    result: Result,
) -> Tensor:
    """Convolve x ``(B, IC, H, W)``, B >= 1, to rows ``(B * OH * OW, OC)``; arguments: see `ConvCall`.

    Channel groups are convolved one after the other.
    """
    if geometry.groups > 1:
        one_group = partial(conv2d, activation=activation, result=result)
        return host.by_channel_groups(one_group, x, weight, sums, bias, geometry)
    device, call = device_of(x.device), ConvCall(x, weight, sums, bias, geometry, activation, result)
    kernel = next(kernel for kernel in CONVOLUTIONS if kernel.serves(device, call))
    return kernel.launch(call, device, next(kernel.candidates(device, call)))
