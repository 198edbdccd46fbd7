"""Device and dtype of a model that has no float parameters left, as OLMo, whose norms have none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..nn.base import QuantizedModule


class Place(nn.Module):
    """An empty parameter, from which transformers reads a model's device and dtype. It is in no state dict."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, device=device, dtype=dtype), requires_grad=False)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Save nothing."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing."""


def keep_place(model: nn.Module) -> None:
    """Let ``model.device`` and ``model.dtype`` work, and with them ``generate`` and ``save_pretrained``."""
    first = next((module for module in model.modules() if isinstance(module, QuantizedModule)), None)
    if first is not None and not any(parameter.is_floating_point() for parameter in model.parameters()):
        weight = first.weight
        model.add_module("qcore_place", Place(weight.device, weight.dtype))


def forget_place(model: nn.Module) -> None:
    """Undo `keep_place` in all parts of a model, once they have float parameters of their own."""
    for part in list(model.modules()):
        if "qcore_place" in part._modules:  # noqa: SLF001 - torch's table
            del part.qcore_place
