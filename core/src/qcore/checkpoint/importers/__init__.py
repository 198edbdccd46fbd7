"""Checkpoints of other tools, one module per format: which weights a checkpoint holds, and how their bytes are read.

May import: the modules of checkpoint that read files and records, and the floors below. Imported by: `opening` and the
exporters.
"""

from __future__ import annotations

from .awq import AWQ
from .base import Importer, Source
from .gptq import GPTQ

_BUILTIN: tuple[Importer, ...] = (GPTQ(), AWQ())


def find_importer(source: Source) -> Importer | None:
    """The importer that recognizes a checkpoint; None for one that is not quantized, or by an unknown tool."""
    return next((importer for importer in _BUILTIN if importer.recognizes(source)), None)


def importer_names() -> list[str]:
    """The names of all importers."""
    return [importer.name for importer in _BUILTIN]
