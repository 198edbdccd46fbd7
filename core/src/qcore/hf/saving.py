"""``save_pretrained`` and ``dequantize`` of models that hold quantized layers, however these came into the model.

transformers asks a model's ``hf_quantizer`` for what it saves. ``from_pretrained`` sets that attribute;
`qcore.quantize_`, `qcore.load_`, a copy, a pickle, or layers exchanged by hand do not, and may see a part of the model
only. So the layers decide: as long as a model holds one, its class answers for the attribute. Nothing else of the model
changes: transformers forbids ``half()``, ``float()`` and full fine-tuning where ``is_quantized`` is set, and qcore's
layers allow them.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..nn.base import QuantizedModule
from ..nn.neutral import NeutralLinear
from ..runtime.companions import on_changed, on_saving
from .config import QcoreConfig
from .placing import keep_place
from .quantizer import QcoreQuantizer

_NAME = "hf_quantizer"


class _OfLayers:
    """The attribute ``hf_quantizer`` of a model without one of its own: present while there are quantized layers."""

    def __get__(self, model: Any, kind: type | None = None) -> QcoreQuantizer:
        modules = () if model is None else model.modules()
        if not any(isinstance(module, (QuantizedModule, NeutralLinear)) for module in modules):
            raise AttributeError(_NAME)
        return QcoreQuantizer(QcoreConfig())


def install() -> None:
    """Let every model of transformers find out whether it holds quantized layers."""
    if not hasattr(PreTrainedModel, _NAME) and _NAME not in vars(PreTrainedModel):
        setattr(PreTrainedModel, _NAME, _OfLayers())
        on_changed(_keep_places)
        on_saving(_describe)


def _describe(model: nn.Module) -> bool:
    """Describe the layers in the model's configuration, which users may write beside what `qcore.save` wrote."""
    if isinstance(model, PreTrainedModel):
        own = getattr(model, _NAME, None)
        if own is None and isinstance(getattr(model.config, "quantization_config", None), QcoreConfig):
            own = QcoreQuantizer(QcoreConfig())  # its layers were quantized when it was saved before
        if isinstance(own, QcoreQuantizer) and own.describe(model):
            model.config.dtype = model.dtype  # transformers would take that of the first tensor, e.g. of scales
    return any(isinstance(part, PreTrainedModel) for part in model.modules())


def _keep_places(model: nn.Module) -> None:
    for part in list(model.modules()):
        if isinstance(part, PreTrainedModel):
            keep_place(part)
