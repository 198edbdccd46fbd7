"""Quantized modules: drop-in replacements for `torch.nn.Linear`, `Conv2d` and `Embedding`."""

from .conv2d import QuantizedConv2d
from .embedding import QuantizedEmbedding
from .linear import QuantizedLinear

__all__ = ["QuantizedConv2d", "QuantizedEmbedding", "QuantizedLinear"]
