"""Quantized modules: drop-in replacements for `torch.nn.Linear`, `Conv2d`, `Embedding` and fused experts.

May import: functional and the floors below it. Imported by: model, parallel, graphs, checkpoint, adapters, hf, testing,
plugin_api, `qcore`.
"""

from .conv2d import QuantizedConv2d
from .embedding import QuantizedEmbedding
from .experts import QuantizedExperts
from .grouped_linear import QuantizedGroupedLinear
from .linear import QuantizedLinear
from .neutral import NeutralLinear

__all__ = [
    "NeutralLinear",
    "QuantizedConv2d",
    "QuantizedEmbedding",
    "QuantizedExperts",
    "QuantizedGroupedLinear",
    "QuantizedLinear",
]
