"""Safetensors checkpoints: save, load, quantize as a stream, inspect. Nothing here runs code found in a file."""

from .inventory import Inventory, TensorInfo, inspect
from .loading import LoadReport, load_
from .saving import save
from .streaming import TensorReport, quantize_checkpoint

__all__ = ["Inventory", "LoadReport", "TensorInfo", "TensorReport", "inspect", "load_", "quantize_checkpoint", "save"]
