"""qcore: quantize once, run on any accelerator, and always know why it ran there."""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any
from warnings import warn as _warn

import torch as _torch

from . import nn
from ._version import __version__
from .contracts import Conv2dRequest, EmbeddingRequest, GroupedLinearRequest, LinearRequest
from .discovery import hookspecs
from .discovery.hookspecs import hookimpl
from .discovery.kernels import (
    EMULATED,
    FALLBACK,
    NATIVE,
    OFFLOAD,
    Available,
    Kernel,
    Offer,
    Rank,
    Refusal,
    Unavailable,
)
from .discovery.registry import PluginStatus, plugins
from .errors import (
    CheckpointError,
    ConformanceError,
    FormatError,
    PluginError,
    QcoreError,
    QcoreWarning,
    UnsupportedError,
)
from .formats import PLAIN, PLAIN_INT32, Element, Format, Layout, ScaleType, ZeroPoint, grouped_int4
from .formats import find_layout as _find_layout
from .functional import conv2d, embedding, grouped_linear, linear
from .functional import torch_ops as _ops  # noqa: F401 - registers torch.ops.qcore
from .model import Report, fuse_, quantize_, report
from .resolving.decision import Decision
from .resolving.explaining import explain
from .resolving.resolver import resolve
from .runtime import companions as _companions
from .runtime import progress as _progress
from .runtime.settings import configure, using
from .weights.activations import DynamicFP8, DynamicInt8, OutputInt8, StaticFP8, StaticInt8
from .weights.qtensor import QTensor
from .weights.quantizers import quantize
from .weights.schemes import Scheme

if _TYPE_CHECKING:
    from . import graphs
    from .checkpoint import convert, load_, save

__all__ = [
    "EMULATED",
    "FALLBACK",
    "NATIVE",
    "OFFLOAD",
    "PLAIN",
    "PLAIN_INT32",
    "Available",
    "CheckpointError",
    "ConformanceError",
    "Conv2dRequest",
    "Decision",
    "DynamicFP8",
    "DynamicInt8",
    "Element",
    "EmbeddingRequest",
    "Format",
    "FormatError",
    "GroupedLinearRequest",
    "Kernel",
    "Layout",
    "LinearRequest",
    "Offer",
    "OutputInt8",
    "PluginError",
    "PluginStatus",
    "QTensor",
    "QcoreError",
    "QcoreWarning",
    "Rank",
    "Refusal",
    "Report",
    "ScaleType",
    "Scheme",
    "StaticFP8",
    "StaticInt8",
    "Unavailable",
    "UnsupportedError",
    "ZeroPoint",
    "__version__",
    "configure",
    "conv2d",
    "convert",
    "embedding",
    "explain",
    "fuse_",
    "graphs",
    "grouped_int4",
    "grouped_linear",
    "hookimpl",
    "hookspecs",
    "linear",
    "load_",
    "nn",
    "plugins",
    "quantize",
    "quantize_",
    "report",
    "resolve",
    "save",
    "using",
]


def __getattr__(name: str) -> _Any:
    # Imported on first access: checkpoints need safetensors, which many programs never use.
    if name in ("save", "load_", "convert"):
        from . import checkpoint

        return getattr(checkpoint, name)
    if name == "graphs":  # imports torch's compiler
        from importlib import import_module

        return import_module(".graphs", __name__)
    raise AttributeError(f"module 'qcore' has no attribute {name!r}")


def _bar(title: str, unit: str, forced: bool) -> _Any:
    # Imported when the first bar is drawn: only the command line uses rich.
    from .cli.progress import Progress

    return Progress(title, unit, forced).shown()


_progress.install_bar(_bar)


def _join_transformers() -> None:
    # Else save_pretrained of a model that quantize_ has changed would write tensors without their records.
    from importlib import import_module

    try:
        import_module(".hf", __name__)
    except ImportError as error:
        _warn(f"save_pretrained cannot save quantized layers; use qcore.save: {error}", QcoreWarning, stacklevel=2)


def _join_peft() -> None:
    # Else peft finds no linear layer in a quantized model, unless the program imports qcore.adapters.
    from contextlib import suppress
    from importlib import import_module

    with suppress(ImportError, AttributeError):  # of a version whose private names differ: peft then refuses the layers
        import_module(".adapters", __name__)


_companions.when_imported("transformers.modeling_utils", _join_transformers)
_companions.when_imported("peft.tuners.lora.model", _join_peft)

# Lets torch.load(weights_only=True) unpickle a QTensor and its fields.
_torch.serialization.add_safe_globals([QTensor, Format, ScaleType, ZeroPoint, _find_layout, _torch.Size])
