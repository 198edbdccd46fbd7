"""Checkpoints for other tools, one module per format: how a weight's bytes are written, and which are unsupported.

May import: the modules of checkpoint that write files and records, and the floors below. Imported by: converting.
"""

from __future__ import annotations

from collections.abc import Callable

from .awq import AWQExporter
from .base import Exporter
from .compressed_tensors import CompressedTensorsExporter
from .gptq import GPTQExporter

EXPORTERS: dict[str, Callable[[], Exporter]] = {
    "gptq": GPTQExporter,
    "awq": AWQExporter,
    "compressed-tensors": CompressedTensorsExporter,
}
"""Name of a tool's format to the factory of its exporter; each conversion creates a new one."""
