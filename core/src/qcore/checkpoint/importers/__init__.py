"""Checkpoints of other tools, one module per format: each finds the weights of a checkpoint and decodes their bytes.

May import: the modules of checkpoint that read files and records, and the floors below. Imported by: converting,
exporters, fusing, gguf_archive, imported, joining, opening, plugin_api.
"""

from __future__ import annotations

from .awq import AWQ
from .base import Importer
from .bitsandbytes import BitsAndBytes
from .compressed_tensors import CompressedTensors
from .fp8 import FP8
from .gptq import GPTQ
from .hqq import HQQ
from .modelopt import ModelOpt
from .mxfp4 import MXFP4
from .quanto import Quanto
from .torchao import TorchAO

BUILTIN: tuple[Importer, ...] = (
    GPTQ(),
    AWQ(),
    CompressedTensors(),
    FP8(),
    ModelOpt(),
    MXFP4(),
    BitsAndBytes(),
    HQQ(),
    Quanto(),
    TorchAO(),
)
"""The importers of qcore. The first that recognizes a checkpoint reads it; those of plugins are tried after them."""
