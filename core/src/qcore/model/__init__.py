"""Whole models: selecting layers, replacing them, calibrating activations, and reporting what serves each layer.

May import: nn, functional, resolving and what lies below. Imported by: checkpoint, testing, cli.
"""

from .quantizing import quantize_
from .report import LayerReport, Report, report

__all__ = ["LayerReport", "Report", "quantize_", "report"]
