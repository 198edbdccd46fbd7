"""What runs in place of a float weight: the quantized layers of qcore, bound to the kernels of the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qcore import QTensor, UnsupportedError
from qcore.nn import QuantizedLinear

from .layer_weight import Part


class ServedLinear(nn.Module):
    """``x @ W^T + bias`` with the rows of W in one part or several, whose results are joined.

    Parts differ in format or scheme: a fused layer of vLLM may hold weights that were quantized differently.
    """

    _only: nn.Module | None
    """The layer, if there is one part."""

    def __init__(self, parts: Sequence[Part], bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._take([_layer(part, bias, dtype) for part in parts])

    def _take(self, layers: list[nn.Module]) -> None:
        self.parts = nn.ModuleList(layers)
        # Beside the registered name, past torch's table: a lookup there costs as much as the rest of a call.
        object.__setattr__(self, "_only", layers[0] if len(layers) == 1 else None)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``(..., K)``."""
        only: Any = self._only
        if only is not None:
            result: Tensor = only(x)
            return result
        return torch.cat([part(x) for part in self.parts], dim=-1)

    def without_bias(self) -> ServedLinear:
        """The same weights, shared, without a bias."""
        made = ServedLinear((), None, torch.float32)
        made._take([_unbiased(layer) for layer in self.parts])
        return made


def _layer(part: Part, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
    own = None if bias is None else bias.detach().narrow(0, part.row, part.rows).clone()
    if isinstance(part.weight, QTensor):
        if part.scheme is not None and part.scheme.output is not None:
            raise UnsupportedError(
                f"{part}: its results are int8 codes (-o8), which vLLM's layers cannot pass on.\n"
                f"Quantize the model with a scheme without -o8."
            )
        own = None if own is None else nn.Parameter(own, requires_grad=False)
        return QuantizedLinear.from_qtensor(part.weight, own, part.scheme, dtype=dtype)
    return _dense(part.weight, own)


def _dense(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _unbiased(layer: nn.Module) -> nn.Module:
    if isinstance(layer, QuantizedLinear):
        made = QuantizedLinear.from_qtensor(layer.weight, None, layer.scheme, dtype=layer.weight.dtype)
        made.weight = layer.weight  # type: ignore[misc]  # shared from now on
        return made
    assert isinstance(layer, nn.Linear)
    return _dense(layer.weight, None)
