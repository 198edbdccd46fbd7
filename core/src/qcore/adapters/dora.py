"""DoRA over a quantized linear layer: the magnitude of each row of the weight trains apart from its direction.

``y = m / ||W + D|| * (W + D) x + bias``, with the update ``D = scaling * B A`` and one magnitude m per row; the norm is
taken per row and gets no gradient (Liu et al., 2024, section 4.3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import LoraVariant
from torch import Tensor, nn


class _Magnitude(nn.Module):
    """The magnitudes m ``(N,)``; the parameter has the name used by peft's own class, so that files are compatible."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start)


class DoraVariant(LoraVariant):
    """Runs and merges an adapter with ``use_dora`` for `LoraLinear`."""

    def supports_lora_conversion(self) -> bool:
        return False

    @staticmethod
    def init(module: Any, adapter_name: str, **_kwargs: Any) -> None:
        """Initialize with the norm of each row, so that at first the layer computes the same as without the adapter."""
        if module.lora_A[adapter_name].weight.device.type == "meta":
            start = torch.empty(module.out_features, device="meta")
        else:
            delta = module.get_delta_weight(adapter_name).detach().float()
            start = _norms(_dense(module), delta)
        module.lora_magnitude_vector[adapter_name] = _Magnitude(start)

    @staticmethod
    def scale(module: Any, adapter_name: str, delta: Tensor) -> Tensor:
        """``m / ||W + D||`` ``(N, 1)``, float32: a merge multiplies rows by it; W is the weight without adapters."""
        unmerged = module._unmerged  # noqa: SLF001 - of this package
        dense = _dense(module) if unmerged is None else unmerged.weight.dequantize(torch.float32)
        magnitude: Tensor = module.lora_magnitude_vector[adapter_name].weight.float()
        return (magnitude / _norms(dense, delta))[:, None]

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_kwargs: Any) -> Tensor:
        """``result`` (of the base layer, with its bias) plus the contribution of the adapter."""
        base, dropout = module.get_base_layer(), module.lora_dropout[active_adapter]
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        scaling, dropped = module.scaling[active_adapter], dropout(x)
        dense = _dense(module)
        with torch.no_grad():
            norm = _norms(dense, module.get_delta_weight(active_adapter).float())
        ratio = (module.lora_magnitude_vector[active_adapter].weight / norm).to(x.dtype)
        if dropped is x or not module.training:
            product = result if base.bias is None else result - base.bias
        else:
            product = F.linear(dropped, dense.to(x.dtype))
        update: Tensor = (ratio - 1) * product + ratio * up(down(dropped)) * scaling
        return result + update


def _dense(module: Any) -> Tensor:
    weight: Tensor = module.get_base_layer().weight.dequantize(torch.float32)
    return weight


def _norms(weight: Tensor, delta: Tensor) -> Tensor:
    """The norm of each row of the sum, ``(N,)``, float32."""
    norms: Tensor = torch.linalg.vector_norm(weight + delta, dim=1)
    return norms
