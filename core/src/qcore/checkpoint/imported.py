"""A checkpoint of another tool as an `Archive`, with its weights under qcore's names and in qcore's formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointError, FormatError, message_of
from ..weights.parts import parts
from ..weights.qtensor import QTensor
from .archive import Archive
from .header import Entry, TensorSpec, file_error
from .importers.base import ForeignTensor, ForeignWeight, Plan, Read, refusal_error
from .records import Record
from .values import check_weight

_T = TypeVar("_T")
_MOST_OF_NOTHING = 1 << 18
"""The largest product of the other dimensions of a weight without elements."""
_REMEDY = "The file is damaged, or its config.json belongs to another one: download both again."


@dataclass
class ImportedArchive(Archive):
    """The tensors of a checkpoint of another tool, described without reading them.

    ``entries`` and ``shards`` describe the tensors that qcore would store, not those of the file; `read` and
    `quantized` create them. ``method``: the name of the importer.
    """

    method: str = ""
    plan: Plan = field(default_factory=Plan)
    _read: Read = field(default=Archive.read)  # type: ignore[assignment]
    _weights: dict[str, ForeignWeight] = field(default_factory=dict)
    _tensors: dict[str, ForeignTensor] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Archive, method: str, plan: Plan) -> ImportedArchive:
        """Describe the tensors of ``source`` according to ``plan``. Raises `CheckpointError` for layers it refuses."""
        if plan.refused:
            raise refusal_error(source.path, plan.refused)
        used = plan.used
        entries = {name: entry for name, entry in source.entries.items() if name not in used}
        found = cls(source.path, source.files, entries, {name: source.shards[name] for name in entries}, method=method)
        found._read, found.plan = source.read, plan
        for weight in plan.weights:
            found._add_weight(weight, source.shards)
        for tensor in plan.tensors:
            found._add_entry(tensor.name, tensor.dtype, tensor.shape, source.shards[tensor.sources[0]])
            found._tensors[tensor.name] = tensor
        return found

    def _add_weight(self, weight: ForeignWeight, shards: Mapping[str, Path]) -> None:
        if 0 in weight.shape and math.prod(filter(None, weight.shape)) > _MOST_OF_NOTHING:
            # No bytes of the file bound the number of its scales, or that of its experts.
            raise file_error(
                self.path, f"its shape is {tuple(weight.shape)}, although it is empty.", _REMEDY, weight.name
            )
        record = Record(weight.name, weight.scheme.weight, weight.shape, None, weight.scheme.blank(), weight.order)
        *experts, n, k = weight.shape
        try:
            described = {part.name: part for part in parts(weight.scheme.weight, n, k, weight.scale_dtype)}
        except FormatError as error:  # such as a scale of another dtype
            raise file_error(self.path, str(error).replace("\n", " "), _REMEDY, weight.name) from error
        for name in record.tensor_names:
            part = described.get(name.rpartition(".")[2])
            dtype, shape = (part.dtype, part.shape) if part is not None else (torch.int32, (k,))
            self._add_entry(name, dtype, (*experts, *shape), shards[weight.sources[0]])
        self.records[weight.name] = record
        self._weights[weight.name] = weight

    def _add_entry(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], shard: Path) -> None:
        if name in self.entries:
            raise file_error(self.path, "two tensors of the file map to it.", _REMEDY, name)
        size = TensorSpec(name, dtype, shape).nbytes
        self.entries[name], self.shards[name] = Entry(name, dtype, shape, 0, size), shard

    def read(self, name: str) -> Tensor:
        """Read a tensor that is not quantized into new memory on the CPU, in the form that the model needs."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return self._read(name)
        return self._made(name, lambda: tensor.build(self._read))

    def global_scale(self, name: str) -> Tensor | None:
        """Read the global scale of a weight, float32 ``()``; None if it has none."""
        source = self._weights[name].global_scale
        if source:
            return self._made(name, lambda: self._read(source).float().reshape(()))
        return self.quantized(name).global_scale if self.records[name].format.scale.has_global else None

    def quantized(self, name: str) -> QTensor:
        """Read a weight into new memory on the CPU and validate its values."""
        weight = self._weights[name]
        record, shard = self.records[name], self.shards[f"{name}.data"]
        found = self._made(name, lambda: weight.build(self._read))
        if found.format != record.format or tuple(found.shape) != record.shape:
            what = f"importer {self.method!r} returned {found.format} of shape {tuple(found.shape)}"
            raise file_error(shard, f"{what}, not {record.format} of shape {record.shape}.", _REMEDY, name)
        check_weight(found, record, shard)
        return found

    def _made(self, name: str, build: Callable[[], _T]) -> _T:
        try:
            return build()
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:  # sizes or values that contradict each other, or a third party's importer
            kind = "" if isinstance(error, FormatError) else f"{type(error).__name__}: "
            raise file_error(self.path, f"{kind}{message_of(error)}".replace("\n", " "), _REMEDY, name) from error
