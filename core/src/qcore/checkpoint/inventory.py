"""`inspect`: list the tensors of a checkpoint from its headers alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import did_you_mean, dtype_name
from ..model.grouping import grouped
from ..resolving.decision import format_table
from .archive import Archive
from .header import shown
from .imported import ImportedArchive
from .opening import open_checkpoint


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    **Fields:** ``name``; ``kind``: the format of a quantized weight, otherwise the dtype; ``shape``: logical;
    ``quantizer`` and ``scheme``: empty for tensors that are not quantized; ``nbytes``: of all tensors of a weight, 0
    for an alias; ``shard``: the file; ``alias_of``: the name under which a tied tensor is stored, or empty;
    ``order``: whether the columns of a quantized weight have an order.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    quantizer: str
    scheme: str
    nbytes: int
    shard: str
    alias_of: str = ""
    order: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether this is a quantized weight."""
        return bool(self.scheme)


@dataclass(frozen=True)
class Inventory:
    """The tensors of a checkpoint; ``str(inventory)`` is a table.

    **Fields:** ``path``; ``version``: of the qcore that wrote it, empty for other tools; ``tensors``; ``shards``:
    names of its files; ``method``: the importer that reads it, such as ``gptq``, empty for qcore's own and float ones.
    """

    path: str
    version: str
    tensors: tuple[TensorInfo, ...]
    shards: tuple[str, ...]
    method: str = ""

    def __iter__(self) -> Iterator[TensorInfo]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, name: str) -> TensorInfo:
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(f"no tensor is called {name!r}.{did_you_mean(name, [t.name for t in self.tensors])}")

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without the headers of the files."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def quantized(self) -> tuple[TensorInfo, ...]:
        """The quantized weights."""
        return tuple(tensor for tensor in self.tensors if tensor.is_quantized)

    def __str__(self) -> str:
        return self._table(grouped(self.tensors, lambda tensor: tensor.name, _looks))

    def details(self) -> str:
        """Return the table with a line for every tensor; ``str(inventory)`` has one for all equal blocks."""
        return self._table([(tensor.name, [tensor]) for tensor in self.tensors])

    def _table(self, lines: Sequence[tuple[str, Sequence[TensorInfo]]]) -> str:
        header = ("tensor", "kind", "shape", "quantizer", "scheme", "bytes", "shard", "tied to")
        rows = []
        for label, together in lines:
            kind, shape, quantizer, scheme, alias = _looks(together[0])
            shards = dict.fromkeys(shown(tensor.shard) for tensor in together)
            shard = next(iter(shards)) if len(shards) == 1 else f"{len(shards)} files"
            size = f"{sum(tensor.nbytes for tensor in together):,}"
            rows.append((shown(label), kind, shape, quantizer, scheme, size, shard, alias))
        read = f"read by importer {self.method}" if self.method else "not written by qcore"
        wrote = f"written by qcore {self.version}" if self.version else read
        files = f"{len(self.shards)} file{'s' if len(self.shards) != 1 else ''}"
        total = f"{len(self)} tensors, {len(self.quantized)} quantized; {self.total_bytes:,} bytes in {files}; {wrote}"
        return "\n".join([*format_table(header, rows), total])

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain values for JSON."""
        tensors = [{**asdict(t), "shape": list(t.shape)} for t in self.tensors]
        totals = {"total_bytes": self.total_bytes, "quantized": len(self.quantized)}
        return {
            "path": self.path,
            "version": self.version,
            "method": self.method,
            "shards": list(self.shards),
            **totals,
            "tensors": tensors,
        }


def _looks(t: TensorInfo) -> tuple[str, str, str, str, str]:
    """Return the cells of a tensor's line in the table, except for its name, bytes and shard."""
    kind = t.kind + (" ordered" if t.order else "")
    return kind, "x".join(map(str, t.shape)), t.quantizer, t.scheme, shown(t.alias_of)


def inspect(path: str | os.PathLike[str]) -> Inventory:
    """List the tensors of a safetensors file or sharded directory, quantized or not. Reads headers only.

    Raises `CheckpointError` for a file with a truncated, inconsistent or hostile header.
    """
    with open_checkpoint(Path(path), any_part=True) as archive:
        weights = [_weight(archive, name) for name in archive.records]
        plain = [_plain(archive, name) for name in archive.plain_names()]
        tensors = sorted([*weights, *plain], key=lambda t: t.name)
        files = tuple(file.name for file in archive.files)
        method = archive.method if isinstance(archive, ImportedArchive) else ""
        return Inventory(str(path), archive.version, tuple(tensors), files, method)


def _weight(archive: Archive, name: str) -> TensorInfo:
    record, alias = archive.records[name], archive.aliases.get(name, "")
    stored = archive.records[alias or name].tensor_names
    size = 0 if alias else sum(archive.entries[part].nbytes for part in stored)
    shard = archive.shards[stored[0]].name
    quantizer, scheme = record.quantizer or "", str(record.scheme)
    return TensorInfo(name, str(record.format), record.shape, quantizer, scheme, size, shard, alias, record.order)


def _plain(archive: Archive, name: str) -> TensorInfo:
    entry, alias = archive.entry(name), archive.aliases.get(name, "")
    kind, shard = dtype_name(entry.dtype), archive.shards[entry.name].name
    return TensorInfo(name, kind, entry.shape, "", "", 0 if alias else entry.nbytes, shard, alias)
