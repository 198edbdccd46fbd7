"""Checkpoints of other tools, one module per format: which weights a checkpoint holds, and how their bytes are read.

May import: the modules of checkpoint that read files and records, and the floors below. Imported by: `opening`.
"""

from __future__ import annotations

from .base import Importer
from .gptq import GPTQ

BUILTIN: tuple[Importer, ...] = (GPTQ(),)
"""The importers of qcore. The first that recognizes a checkpoint reads it; those of plugins are asked after them."""
