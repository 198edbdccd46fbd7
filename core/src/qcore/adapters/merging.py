"""Merge the updates of adapters into a quantized weight, and undo the merge exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError
from ..nn.base import QuantizedModule
from ..weights.qtensor import QTensor
from ..weights.quantizers import needs_moments, quantize
from ..weights.schemes import Scheme

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_WITHOUT_INPUTS = "mse"
"""Replaces a quantizer that needs inputs of the layer, which a merge does not have; supports every zero point."""

Update = Callable[[Tensor], Tensor]
"""Maps the current weight, float32 ``(N, K)``, to the weight with one more adapter."""


@dataclass(frozen=True)
class Unmerged:
    """The weight, scheme and bias of a layer before adapters were merged into it.

    ``weight`` is the view of the layer's store, so that restoring it also restores packing and ties.
    """

    weight: QTensor
    scheme: Scheme
    bias: Tensor | None

    @classmethod
    def of(cls, base: QuantizedModule) -> Unmerged:
        """Return the current state of ``base``; raises `FormatError` if its weight is not loaded."""
        weight = base.weight
        if weight.device.type == "meta":
            raise FormatError("adapters cannot be merged into a weight on the meta device; load or onload it first.")
        return cls(weight, base.scheme, None if base.bias is None else base.bias.detach().clone())

    def put_back(self, base: Any) -> None:
        """Restore these parts to ``base``; the weight is moved if the layer was moved in the meantime."""
        device = base.weight.device
        base.weight = self.weight if self.weight.device == device else self.weight.to(device)
        base.scheme = self.scheme
        if self.bias is not None and base.bias is not None:
            base.bias.data = self.bias.to(base.bias.device)

    def merged(self, base: Any, updates: Iterable[Update], bias: Tensor | None, name: str) -> None:
        """Set the weight of ``base`` to the quantized sum of this weight and ``updates``, and add ``bias`` to its bias.

        The sum is computed in float32 from the weight before any merge, so errors of earlier merges do not add up, and
        quantized with the weight's own quantizer, or with ``mse`` if that one needs inputs. Scales keep their dtype; a
        weight with an order of columns (act-order) is quantized in the order of the features. Raises `FormatError`, a
        ValueError, for NaN or Inf, and for a format that qcore can read but not produce.
        """
        weight = self.weight
        dense = weight.dequantize(torch.float32)
        for update in updates:
            dense = update(dense)
        rule = weight.quantizer or self.scheme.quantizer or None
        if rule is not None and needs_moments(rule):
            rule = _WITHOUT_INPUTS
        dtype = weight.scale.dtype if weight.scale.dtype in _FLOATS else None
        changed = None if bias is None or self.bias is None else self.bias.float() + bias.float()
        if changed is not None and not torch.isfinite(changed).all():
            raise FormatError(f"{name}: the merged bias contains NaN or Inf; the adapter seems to be broken.")
        made = quantize(dense, weight.format, rule, scale_dtype=dtype, name=f"{name} with its adapters")
        base.weight = made
        base.scheme = replace(base.scheme, quantizer=made.quantizer or "")
        if changed is not None:
            base.bias.data = changed.to(base.bias.dtype)
