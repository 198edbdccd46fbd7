"""Safetensors checkpoints: save, load, inspect, quantize tensor by tensor. Code in a file is never executed.

May import: model, nn and the floors below. Imported by: hf, cli, plugin_api, `qcore`. The last two do so on first
access of a name.
"""

from .converting import Conversion, convert
from .inventory import Inventory, TensorInfo, inspect
from .loading import LoadReport, load_
from .saving import save
from .streaming import TensorReport, quantize_checkpoint

__all__ = [
    "Conversion",
    "Inventory",
    "LoadReport",
    "TensorInfo",
    "TensorReport",
    "convert",
    "inspect",
    "load_",
    "quantize_checkpoint",
    "save",
]
