"""A checkpoint on disk, one file or many, seen as one set of tensors and validated from its headers alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar

from torch import Tensor

from ..qtensor import QTensor
from .header import MAX_HEADER, Entry, parse_json, problem, read_header
from .records import Record, read_notes
from .values import build_weight, read_tensor

_T = TypeVar("_T")
SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
_REWRITE = "The index does not belong to these files: copy or download the directory again."


@dataclass
class Archive:
    """The tensors of a checkpoint. Open with `Archive.open`, as a context.

    **Fields:** ``entries``: every stored tensor; ``shards``: the file of each; ``records``: quantized weights, tied
    names included; ``aliases``: tied name to stored name; ``version``: of the qcore that wrote it, or empty.
    """

    path: Path
    files: list[Path] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    shards: dict[str, Path] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    version: str = ""
    _handles: dict[Path, BinaryIO] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Archive]:
        """Read and check all headers; the files stay open for the block. Raises `CheckpointError`; reads no values."""
        with ExitStack() as stack:
            archive = cls(path)
            try:
                archive._open_all(stack)
            except OSError as error:
                raise problem(
                    path, f"cannot be read: {error.strerror or error}.", "Check the path and rights."
                ) from error
            yield archive

    # Opening.

    def _open_all(self, stack: ExitStack) -> None:
        self.files, index = find_files(self.path)
        for file in self.files:
            self._add(file, stack.enter_context(file.open("rb")))
        if index is not None:
            self._check_index(*index)
        for record in self.records.values():
            self._check_record(record)
        self._check_aliases()

    def _add(self, path: Path, handle: BinaryIO) -> None:
        self._handles[path] = handle
        header = read_header(handle, path)
        notes = read_notes(header.metadata, path)
        self.version = max(self.version, notes.version)
        for name, entry in header.entries.items():
            if name in self.entries:
                raise problem(path, f"also in {self.shards[name].name}; a tensor is stored once.", _REWRITE, name)
            self.entries[name], self.shards[name] = entry, path
        _merge(self.records, notes.records, path)
        _merge(self.aliases, notes.aliases, path)

    def _check_index(self, path: Path, weight_map: dict[str, str]) -> None:
        for name, shard in weight_map.items():
            if name not in self.entries:
                raise problem(path, f"not in {shard}, where the index has it.", _REWRITE, name)
            if self.shards[name].name != shard:
                raise problem(path, f"in {self.shards[name].name}; the index has it in {shard}.", _REWRITE, name)
        for name in self.entries:
            if name not in weight_map:
                raise problem(path, f"in {self.shards[name].name}, but the index does not name it.", _REWRITE, name)

    def _check_record(self, record: Record) -> None:
        """A quantized weight is stored whole, or it is an alias of one that is."""
        if record.name in self.aliases:
            return
        missing = [name for name in record.part_names if name not in self.entries]
        if missing:
            raise problem(self.path, f"its metadata is here, but {missing[0]!r} is not.", tensor=record.name)
        surplus = {record.name, f"{record.name}.zero"} - set(record.part_names)
        for name in surplus & self.entries.keys():
            raise problem(self.path, f"its format {record.format} leaves no place for {name!r}.", tensor=record.name)
        record.check([self.entries[name] for name in record.part_names], self.shards[record.part_names[0]])

    def _check_aliases(self) -> None:
        for name, target in self.aliases.items():
            if target in self.aliases:
                raise problem(self.path, f"it is an alias of {target!r}, which is an alias itself.", tensor=name)
            if name in self.entries:
                raise problem(self.path, f"it is stored and also an alias of {target!r}.", tensor=name)
            if target not in self.records and target not in self.entries:
                raise problem(self.path, f"it is an alias of {target!r}, which is not in the checkpoint.", tensor=name)
            mine, other = self.records.get(name), self.records.get(target)
            if (mine is None) != (other is None) or (mine and other and not mine.same_weight(other)):
                raise problem(self.path, f"its metadata differs from that of {target!r}, its alias.", tensor=name)

    # What is in it.

    def plain_names(self) -> Iterator[str]:
        """The names of tensors that are not quantized, aliases included."""
        parts = {name for record in self.records.values() for name in record.part_names}
        yield from (name for name in self.entries if name not in parts)
        yield from (name for name in self.aliases if name not in self.records)

    def entry(self, name: str) -> Entry:
        """The stored tensor called ``name``, or that it is an alias of."""
        return self.entries[self.aliases.get(name, name)]

    def read(self, name: str) -> Tensor:
        """The values of a tensor that is not quantized, on the CPU in memory of their own."""
        stored = self.aliases.get(name, name)
        return read_tensor(self._handles[self.shards[stored]], self.entries[stored], self.shards[stored])

    def quantized(self, name: str) -> QTensor:
        """A quantized weight, on the CPU, its values validated."""
        record = self.records[self.aliases.get(name, name)]
        tensors = {part.rpartition(".")[2]: self.read(part) for part in record.part_names}
        return build_weight(record, tensors, self.shards[record.part_names[0]])


def _merge(into: dict[str, _T], new: dict[str, _T], path: Path) -> None:
    for name, value in new.items():
        if into.setdefault(name, value) != value:
            raise problem(path, "its metadata differs from that in another shard.", _REWRITE, name)


def find_files(path: Path) -> tuple[list[Path], tuple[Path, dict[str, str]] | None]:
    """The safetensors files of a checkpoint and, where there is one, its index with its weight map."""
    if not path.exists():
        raise problem(path, "there is no such file or directory.", "Check the path.")
    if not path.is_dir():
        if not path.is_file():
            raise problem(path, "it is no regular file.", "Give a .safetensors file or a directory with one.")
        return [path], None
    index = _only(path, INDEX, "*.safetensors.index.json")
    if index is not None:
        weight_map = _read_index(index)
        return [path / shard for shard in sorted(set(weight_map.values()))], (index, weight_map)
    single = _only(path, SINGLE, "*.safetensors")
    if single is None:
        raise problem(path, f"it holds neither {INDEX} nor {SINGLE}.", "Give the directory that holds the weights.")
    return [single], None


def _only(directory: Path, usual: str, pattern: str) -> Path | None:
    """The file with the usual name, or the only one that matches."""
    if (directory / usual).is_file():
        return directory / usual
    found = [file for file in sorted(directory.glob(pattern)) if file.is_file()]
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4])
        raise problem(directory, f"it holds several checkpoints: {names}.", "Name the file that is meant.")
    return found[0] if found else None


def _read_index(path: Path) -> dict[str, str]:
    if path.stat().st_size > MAX_HEADER:
        raise problem(path, f"it is longer than {MAX_HEADER} bytes.")
    weight_map = parse_json(path.read_bytes(), path, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise problem(path, "it holds no weight_map.")
    shards = set()
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise problem(path, f"its shard {str(shard)[:80]!r} is no file name in this directory.", _REWRITE, name)
        shards.add(shard)
    for shard in sorted(shards):
        if not (path.parent / shard).is_file():
            raise problem(path, f"its shard {shard!r} is not in the directory.", "Copy or download the missing file.")
    return weight_map


def _is_plain_name(shard: str) -> bool:
    return shard.endswith(".safetensors") and not set(shard) & set("/\\:\0") and shard.isprintable()
