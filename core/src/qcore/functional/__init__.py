"""Ops on tensors (`linear`, `conv2d`, `embedding`, `grouped_linear`), gradients, and the library ``torch.ops.qcore``.

May import: resolving and the floors below it. Imported by: checkpoint, model, nn, parallel,
`qcore`.
"""

from .calls import conv2d, embedding, grouped_linear, linear

__all__ = ["conv2d", "embedding", "grouped_linear", "linear"]
