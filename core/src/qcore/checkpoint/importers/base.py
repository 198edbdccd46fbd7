"""The interface of importers: each recognizes the checkpoints of one tool and plans how its weights are read.

Nothing is quantized again: an imported weight dequantizes, in float32, to the values that the tool itself computes. A
layer that qcore's formats cannot represent is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import CheckpointError, FormatError, QcoreError, dtype_name, message_of, quoted
from ...formats import Format, ZeroPoint
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from ..header import Entry, file_error
from ..model_config import folder_of, read_json

Read = Callable[[str], Tensor]
"""Reads the stored tensor with the given name into new memory on the CPU."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_MOST_DESCRIPTION = 64
"""The maximum bytes of a tensor that describes a layer."""
USUAL_GROUPS = tuple(1 << i for i in range(3, 15))
"""Columns per scale that tools use."""


@dataclass(frozen=True)
class Source:
    """The files of a checkpoint, opened.

    **Fields:** ``path``: the file or directory; ``config``: its ``config.json``, or empty; ``settings``: the
    ``quantization_config`` in it, or empty; ``entries``: stored tensors by name; ``metadata``: texts in the headers of
    its files; ``read``: reads a stored tensor.
    """

    path: Path
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    read: Read

    @property
    def method(self) -> str:
        """The tool's name in ``quantization_config``, lower case, or empty."""
        method = self.settings.get("quant_method", "")
        return method.lower() if isinstance(method, str) else ""

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the checkpoint's directory, empty if there is none. Raises `CheckpointError`."""
        return read_json(folder_of(self.path) / name)

    def layers(self, *suffixes: str) -> Iterator[str]:
        """Yield the names of layers that store a tensor with each of the suffixes, such as ``"qweight"``."""
        first, *others = suffixes
        for name in self.entries:
            layer, _, suffix = name.rpartition(".")
            if suffix == first and all(tensor_name(layer, other) in self.entries for other in others):
                yield layer

    def integers(self, name: str) -> list[int]:
        """The integers of a small tensor that describes a layer. Raises `LayerRefused` for any other tensor."""
        entry = self.entries[name]
        if not 0 < entry.nbytes <= _MOST_DESCRIPTION or entry.dtype.is_floating_point or entry.dtype.is_complex:
            raise LayerRefused(f"its {name.rpartition('.')[2]} is {entry.dtype} of shape {entry.shape}")
        return [int(value) for value in self.read(name).flatten().tolist()]

    def setting(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A value of ``settings``, of the given type. Raises `CheckpointError` for a value of another type."""
        value = self.settings.get(name, default)
        wrong = isinstance(value, bool) and kind is int
        if value is not None and (wrong or not isinstance(value, kind)):
            raise file_error(
                self.path,
                f"its quantization_config has {name} {quoted(value)}.",
                "Download config.json again: the file is damaged, or from a tool that qcore does not support.",
            )
        return value


def tensor_name(layer: str, part: str) -> str:
    """The name of a tensor of a layer; ``layer`` is empty if the layer is the whole model."""
    return f"{layer}.{part}" if layer else part


@dataclass(frozen=True)
class ForeignWeight:
    """A quantized weight, described from headers and settings alone.

    **Fields:** ``name``: of the parameter in the model, ``"LAYER.weight"``; ``shape``: ``(N, K)`` or ``(E, N, K)``;
    ``scheme``: its weight format, and the activation that the tool uses; ``sources``: stored tensors that ``build``
    reads; ``build``: creates the weight; ``scale_dtype``: of its float scales; ``order``: whether its columns have one;
    ``global_scale``: the one of ``sources`` that holds its global scale, a single number, if there is one.
    """

    name: str
    shape: tuple[int, ...]
    scheme: Scheme
    sources: tuple[str, ...]
    build: Callable[[Read], QTensor]
    scale_dtype: torch.dtype = torch.float32
    order: bool = False
    global_scale: str = ""


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor that is not quantized and has another name, dtype or shape in the model than in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    build: Callable[[Read], Tensor]


@dataclass
class Plan:
    """The contents of a checkpoint. Tensors that are in no ``sources`` and not in ``dropped`` are read unchanged.

    **Fields:** ``weights``; ``tensors``; ``dropped``: names of unused stored tensors; ``refused``: layer to the reason
    why it cannot be read; ``notes``: layer to a difference from how the tool runs it, for a warning.
    """

    weights: list[ForeignWeight] = field(default_factory=list)
    tensors: list[ForeignTensor] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def used(self) -> set[str]:
        """The names of stored tensors that a weight or tensor is built from, or that are unused."""
        parts: Iterable[ForeignWeight | ForeignTensor] = (*self.weights, *self.tensors)
        return {name for part in parts for name in part.sources} | self.dropped

    def add(self, other: Plan) -> None:
        """Add the contents of another plan."""
        self.weights += other.weights
        self.tensors += other.tensors
        self.dropped |= other.dropped
        self.refused |= other.refused
        self.notes |= other.notes


class Importer(Protocol):
    """Reads the checkpoints of one tool. A plugin returns its importers from the hook ``qcore_importers``."""

    @property
    def name(self) -> str:
        """Its name in reports and errors."""
        ...

    def recognizes(self, source: Source) -> bool:
        """Whether the checkpoint is from this tool, judging by settings, names, shapes and dtypes."""
        ...

    def plan(self, source: Source) -> Plan:
        """Describe every quantized weight. Raises `CheckpointError` for settings that cannot be read."""
        ...


class LayerRefused(Exception):  # noqa: N818 - says what happens to a layer, is caught and never seen by users
    """Raised while one layer is planned: why qcore, or the format that is written, cannot represent it exactly."""


def plan_layers(layers: Iterable[str], plan_one: Callable[[str, Plan], None]) -> Plan:
    """Plan layer by layer; a `LayerRefused` is noted, so that the error of the load can name every layer.

    So is any other error, except one of the file: tensors of damaged files contradict each other in countless ways.
    """
    plan = Plan()
    for layer in layers:
        with _noting_refusals(layer, plan):
            plan_one(layer, plan)
    return plan


@contextmanager
def _noting_refusals(layer: str, plan: Plan) -> Iterator[None]:
    try:
        yield
    except (LayerRefused, FormatError) as refusal:
        plan.refused[layer] = str(refusal).replace("\n", " ")
    except (QcoreError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001
        plan.refused[layer] = f"{type(error).__name__}: {message_of(error)}".replace("\n", " ")


def check_dtypes(source: Source, names: Mapping[str, str], **allowed: tuple[torch.dtype, ...]) -> None:
    """Raise `LayerRefused` unless the tensors of a layer have one of these dtypes: another one has other bytes.

    ``names``: of the stored tensors, by part; ``allowed``: by part; parts without a tensor are ignored.
    """
    for part, dtypes in allowed.items():
        found = source.entries[names[part]].dtype if part in names else dtypes[0]
        if found not in dtypes:
            wanted = " or ".join(map(dtype_name, dtypes))
            raise LayerRefused(f"its {part} is {dtype_name(found)}; it must be {wanted}")


def refusal_error(path: Path, refused: Mapping[str, str]) -> CheckpointError:
    """The error for layers that cannot be read: up to five of them, each with its reason."""
    shown = [f"{layer!r}: {reason}" for layer, reason in list(refused.items())[:5]]
    more = f" (and {len(refused) - 5} more)" if len(refused) > 5 else ""
    plural = "s" if len(refused) > 1 else ""
    return file_error(
        path,
        f"{len(refused)} layer{plural} cannot be read{more}. {'; '.join(shown)}.",
        "Get the checkpoint in another format, or quantize the float model with qcore.",
    )


def calibrated(target: str, dtype: torch.dtype, name: str) -> ForeignTensor:
    """A calibrated scale or zero point, stored as ``name``, as the single number of ``dtype`` that a scheme takes."""
    return ForeignTensor(target, dtype, (), (name,), lambda read: read(name).to(dtype).reshape(()))


def group_size(k: int, groups: int, *wanted: int | None) -> int | None:
    """The columns per scale of a weight with K columns and G scales per row; None for one scale.

    ``wanted``: sizes in the settings, of all layers and of single ones; -1 or None for one scale. Without one that
    fits, groups are taken to be K / G columns each, unless the last one may be shorter. Raises `LayerRefused` if no
    size gives G groups, or several do.
    """
    if groups == 1 and not (wanted and wanted[0] and 0 < wanted[0] < k):
        return None
    for size in wanted:
        if size and size > 0 and -(-k // size) == groups:
            return size
    if groups < 1 or -(-k // -(-k // groups)) != groups:
        raise LayerRefused(f"{k} columns cannot be split into {groups} groups of one size")
    usual = [size for size in USUAL_GROUPS if groups > 1 and size * groups != k and -(-k // size) == groups]
    if k % groups or usual:
        sizes = f"such as {k // groups} or {usual[0]} columns" if usual and not k % groups else "of several sizes"
        why = "and its settings contain no group_size that fits"
        raise LayerRefused(f"{k} columns can be split into {groups} groups {sizes}, {why}")
    return k // groups


def int_format(bits: int, group: int | None, zero: ZeroPoint) -> Format:
    """The format of 4- or 8-bit integer weights; ``group``: columns per scale, None for one per row."""
    zeros = {ZeroPoint.NONE: "", ZeroPoint.INT: "-asym", ZeroPoint.FLOAT: "-fzp"}
    return Format.parse(f"int{bits}" + (f"-g{group}" if group else "") + zeros[zero])


def within_rows(values: Tensor, block: int, shape: tuple[int, int]) -> Tensor:
    """One value for each block of a flattened weight ``(N, K)``, as one for each of its groups, ``(G, N)``.

    Blocks that cross rows become groups of gcd(block, K) columns, several of which have the same value.
    """
    n, k = shape
    group = math.gcd(block, k)
    if group < block:
        values = values[torch.arange(n * k // group) // (block // group)]
    return values.view(n, k // group).t()


def order_by_group(g_idx: Tensor, size: int | None) -> Tensor | None:
    """The order of columns that makes groups contiguous, int32 (K,), or None if they are.

    ``g_idx``: the group of each column, integers (K,); ``size``: columns per group.
    """
    k = g_idx.shape[0]
    groups = torch.arange(k) // (size or max(k, 1))
    if torch.equal(g_idx.long(), groups):
        return None
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order].long(), groups):
        raise LayerRefused("its g_idx has groups of unequal size")
    return order.to(torch.int32)
