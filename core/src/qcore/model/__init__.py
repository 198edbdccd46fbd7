"""Whole models: selecting layers, replacing them, calibrating activations, and reporting the kernel of each layer.

May import: nn, functional, resolving and the floors below. Imported by: parallel, checkpoint, hf, cli, plugin_api,
`qcore`.
"""

from .fusing import fuse_
from .quantizing import quantize_
from .report import LayerReport, Report, report

__all__ = ["LayerReport", "Report", "fuse_", "quantize_", "report"]
