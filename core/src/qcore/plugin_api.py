"""The public API for plugin authors, in addition to the names of `qcore` itself.

Everything listed in ``__all__`` is public and follows the deprecation policy in the docs: a name stays for two minor
releases after the one that deprecates it, with a `DeprecationWarning`. The modules behind these names are private.
The plugins of this repository import `qcore` and `qcore.plugin_api` only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .contracts import (
    CONTRACTS,
    CONV2D,
    EMBEDDING,
    GIVEN_NAMES,
    GROUPED_LINEAR,
    LINEAR,
    Conv2dRequest,
    EmbeddingRequest,
    GroupedLinearRequest,
    LinearRequest,
    Problem,
    Request,
)
from .contracts.conv2d import check_image, convolved_size, laid_out_like, output_size
from .contracts.embedding import check_indices
from .contracts.grouped import check_offsets
from .contracts.refusals import FLOATS, AnyRequest, why_not_dtypes, why_not_empty, why_not_encoding
from .discovery.hardware import Hardware, installed_version, on_pci, word
from .discovery.hookspecs import hookimpl
from .discovery.kernels import (
    EMULATED,
    FALLBACK,
    NATIVE,
    OFFLOAD,
    Available,
    Kernel,
    Offer,
    Packed,
    Rank,
    Refusal,
    RowsKernel,
    Unavailable,
    check_weight,
    define_op,
)
from .discovery.registry import registry
from .errors import FormatError, PluginError, first_line
from .fallback.padding import float_conv2d
from .formats import PLAIN, PLAIN_INT32, Element, Format, Layout, ScaleType, ZeroPoint
from .formats.bits import has_values
from .formats.tracing import runs_now
from .model.selection import Selection
from .nn.bound import BoundLayer, binding_of, bound_layer, layer_contract
from .resolving.decision import Decision, format_table
from .runtime.disk_cache import files_dir
from .runtime.disk_cache import read as read_record
from .runtime.disk_cache import write as write_record
from .weights.activations import (
    Activation,
    DynamicInt8,
    OutputInt8,
    StaticInt8,
    dynamic_parameters,
    given_numbers,
    quantize_int8,
)
from .weights.parts import Part, parts
from .weights.qtensor import QTensor, contiguous
from .weights.registered_quantizers import Quantizer
from .weights.schemes import Scheme

if TYPE_CHECKING:
    from .checkpoint.archive import Archive
    from .checkpoint.importers.base import ForeignTensor, ForeignWeight, Importer, LayerRefused, Plan, Source
    from .checkpoint.opening import open_checkpoint
    from .graphs import (
        Compiled,
        GraphBackend,
        Input,
        PartRefused,
        Resident,
        Role,
        Stamp,
        base_name,
        bucket,
        constant_value,
        is_constant,
        is_whole,
        layers_of,
        scheme_of,
        torch_compile_backend,
        version,
        weight_of,
        why_shared,
    )
    from .graphs import Part as GraphPart
    from .parallel import plan_for

__all__ = [
    "CONTRACTS",
    "CONV2D",
    "EMBEDDING",
    "EMULATED",
    "FALLBACK",
    "FLOATS",
    "GIVEN_NAMES",
    "GROUPED_LINEAR",
    "LINEAR",
    "NATIVE",
    "OFFLOAD",
    "PLAIN",
    "PLAIN_INT32",
    "Activation",
    "AnyRequest",
    "Archive",
    "Available",
    "BoundLayer",
    "Compiled",
    "Conv2dRequest",
    "Decision",
    "DynamicInt8",
    "Element",
    "EmbeddingRequest",
    "ForeignTensor",
    "ForeignWeight",
    "Format",
    "FormatError",
    "GraphBackend",
    "GraphPart",
    "GroupedLinearRequest",
    "Hardware",
    "Importer",
    "Input",
    "Kernel",
    "LayerRefused",
    "Layout",
    "LinearRequest",
    "Offer",
    "OutputInt8",
    "Packed",
    "Part",
    "PartRefused",
    "Plan",
    "PluginError",
    "Problem",
    "QTensor",
    "Quantizer",
    "Rank",
    "Refusal",
    "Request",
    "Resident",
    "Role",
    "RowsKernel",
    "ScaleType",
    "Scheme",
    "Selection",
    "Source",
    "Stamp",
    "StaticInt8",
    "Unavailable",
    "ZeroPoint",
    "base_name",
    "binding_of",
    "bound_layer",
    "bucket",
    "check_image",
    "check_indices",
    "check_offsets",
    "check_weight",
    "constant_value",
    "contiguous",
    "convolved_size",
    "define_op",
    "dynamic_parameters",
    "files_dir",
    "first_line",
    "float_conv2d",
    "format_table",
    "given_numbers",
    "has_values",
    "hookimpl",
    "installed_version",
    "is_constant",
    "is_whole",
    "laid_out_like",
    "layer_contract",
    "layers_of",
    "on_pci",
    "open_checkpoint",
    "output_size",
    "parts",
    "plan_for",
    "quantize_int8",
    "read_record",
    "registry",
    "runs_now",
    "scheme_of",
    "torch_compile_backend",
    "version",
    "weight_of",
    "why_not_dtypes",
    "why_not_empty",
    "why_not_encoding",
    "why_shared",
    "word",
    "write_record",
]

_OF_CHECKPOINTS = {
    **dict.fromkeys(("ForeignTensor", "ForeignWeight", "Importer", "LayerRefused", "Plan", "Source"), "importers.base"),
    "Archive": "archive",
    "open_checkpoint": "opening",
}
_OF_GRAPHS = {
    name: name.removeprefix("Graph") if name == "GraphPart" else name
    for name in (
        "Compiled", "GraphBackend", "GraphPart", "Input", "Resident", "Role", "base_name", "bucket", "is_whole",
        "Stamp", "layers_of", "scheme_of", "torch_compile_backend", "version", "weight_of",
        "why_shared", "is_constant", "constant_value", "PartRefused",
    )
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Imported on first access: device plugins read no checkpoints, and few run whole graphs.
    if name in _OF_CHECKPOINTS:
        return getattr(import_module(f".checkpoint.{_OF_CHECKPOINTS[name]}", __package__), name)
    if name in _OF_GRAPHS:
        return getattr(import_module(".graphs", __package__), _OF_GRAPHS[name])
    if name == "plan_for":
        return getattr(import_module(".parallel", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
