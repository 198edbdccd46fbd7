"""A checkpoint on disk, one file or several, as one set of tensors, validated from its headers alone.

A directory may be overwritten while it is read. A save replaces the index atomically and gives its shards new names, so
the shards of an index are either complete, or they were removed after a new index replaced it; then the new one is
read. Open files stay readable after they are unlinked.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from torch import Tensor

from ..errors import CheckpointError, FormatError, quoted
from ..nn.base import static_parameters, with_static_parameters
from ..weights.qtensor import QTensor
from ..weights.schemes import Scheme
from .foreign import first_foreign
from .header import MAX_HEADER, Entry, file_error, parse_json, read_header, readable, shown, without_gc
from .records import REMEDIES, SAVE, Record, read_notes
from .values import build_weight, read_tensor

_T = TypeVar("_T")
SINGLE = "model.safetensors"
INDEX: str = f"{SINGLE}.index.json"
_RETRY_SECONDS = 5.0
"""Seconds for which opening is retried if the checkpoint is replaced each time while it is opened."""
_REWRITE = "The index does not belong to these files: copy or download the directory again."


@dataclass
class Archive:
    """The tensors of a checkpoint; use `Archive.open` as a context manager.

    **Fields:** ``entries``: stored tensors by name; ``shards``: the file of each; ``records``: quantized weights by
    name, including tied names; ``aliases``: tied name to stored name; ``version``: of the qcore that wrote it, or
    empty; ``metadata``: the texts in the headers of its files; ``guards``: names of the empty tensors of
    `writing.guards`.
    """

    path: Path
    files: list[Path] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    shards: dict[str, Path] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    version: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    _handles: dict[Path, BinaryIO] = field(default_factory=dict)
    _saves: dict[str, Path] = field(default_factory=dict)
    guards: set[str] = field(default_factory=set)

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Archive]:
        """Read and check all headers, but no values; the files stay open in the block. Raises `CheckpointError`."""
        with ExitStack() as stack:
            yield cls._open_retrying(path, stack)

    @classmethod
    def _open_retrying(cls, path: Path, stack: ExitStack) -> Archive:
        end = time.monotonic() + _RETRY_SECONDS
        while True:
            before = _fingerprint(path)
            try:
                with ExitStack() as files, without_gc():
                    archive = cls(path)
                    archive._open_all(files)
                    stack.push(files.pop_all())
                    return archive
            except (CheckpointError, OSError):
                # The error is real if the files did not change meanwhile; otherwise read the new ones.
                if _fingerprint(path) == before or time.monotonic() > end:
                    with readable(path):
                        raise
            time.sleep(0.001)

    # Opening.

    def _open_all(self, stack: ExitStack) -> None:
        self.files, index = find_files(self.path)
        for file in self.files:
            self._add(file, stack.enter_context(file.open("rb")))
        if index is not None:
            self._check_index(index)
        # Because of these empty tensors, transformers without qcore does not treat the quantized weights as missing.
        parameters = (record.parameter for record in self.records.values())
        guards = [name for name in (*self.records, *parameters, *REMEDIES) if name in self.entries]
        self.guards = {name for name in guards if self.entries[name].shape == (0,)}
        known: set[object] = set()
        for record in self.records.values():
            self._check_record(record, known)
        self._check_aliases()

    def _add(self, path: Path, handle: BinaryIO) -> None:
        self._handles[path] = handle
        header = read_header(handle, path)
        notes = read_notes(header.metadata, path)
        self.version = max(self.version, notes.version)
        self.metadata.update(header.metadata)
        if notes.save:
            self._saves.setdefault(notes.save, path)
        for name, entry in header.entries.items():
            if name in self.entries:
                raise file_error(
                    path, f"also in {shown(self.shards[name].name)}; a tensor must be stored only once.", _REWRITE, name
                )
            self.entries[name], self.shards[name] = entry, path
        _merge(self.records, notes.records, path)
        _merge(self.aliases, notes.aliases, path)

    def _check_index(self, index: Index) -> None:
        path = index.path
        if len(self._saves.keys() | {index.save} - {""}) > 1:
            other = next((file.name for save, file in self._saves.items() if save != index.save), "")
            raise file_error(path, f"{shown(other)!r} belongs to another save than the other shards.", _REWRITE)
        for name, shard in index.weight_map.items():
            if name not in self.entries:
                raise file_error(path, f"not in {shown(shard)}, although the index names that file.", _REWRITE, name)
            if self.shards[name].name != shard:
                what = f"in {shown(self.shards[name].name)}; according to the index it is in {shown(shard)}."
                raise file_error(path, what, _REWRITE, name)
        for name in self.entries:
            if name not in index.weight_map:
                what = f"in {shown(self.shards[name].name)}, but the index does not name it."
                raise file_error(path, what, _REWRITE, name)

    def _check_record(self, record: Record, known: set[object]) -> None:
        """Raise unless a quantized weight, or the weight it is an alias of, is stored completely.

        ``known``: combinations of format, shapes and dtypes that were checked already.
        """
        if record.name in self.aliases:
            return
        missing = [name for name in record.tensor_names if name not in self.entries]
        if missing:
            raise file_error(self.path, f"its metadata is here, but {shown(missing[0])!r} is not.", tensor=record.name)
        surplus = next((name for name in record.other_names if name in self.entries and name not in self.guards), None)
        if surplus is not None:
            without = " without an order" if surplus == f"{record.name}.order" else ""
            what = f"its format {record.format}{without} has no tensor {shown(surplus)!r}."
            raise file_error(self.path, what, tensor=record.name)
        parts = [self.entries[name] for name in record.tensor_names]
        key = (record.format, record.shape, *((part.dtype, part.shape) for part in parts))
        if key not in known:
            record.check(parts, self.shards[record.tensor_names[0]])
            known.add(key)

    def _check_aliases(self) -> None:
        for name, target in self.aliases.items():
            reason = self._why_no_alias(name, target)
            if reason:
                raise file_error(self.path, reason, tensor=name)

    def _why_no_alias(self, name: str, target: str) -> str:
        other = repr(shown(target))
        if target in self.aliases:
            return f"it is an alias of {other}, which is an alias itself."
        if name in self.entries:
            return f"it is stored and also an alias of {other}."
        if target not in self.records and target not in self.entries:
            return f"it is an alias of {other}, which is not in the checkpoint."
        mine, theirs = self.records.get(name), self.records.get(target)
        if (mine is None) != (theirs is None) or (mine and theirs and not mine.same_weight(theirs)):
            return f"its metadata differs from that of {other}, its alias."
        return ""

    def with_names(self, names: Mapping[str, str]) -> Archive:
        """The same tensors and weights under other names; what ``names`` lacks keeps its name."""

        def new(name: str) -> str:
            return names.get(name, name)

        return replace(
            self,
            entries={new(name): entry._replace(name=new(name)) for name, entry in self.entries.items()},
            shards={new(name): shard for name, shard in self.shards.items()},
            records={new(name): replace(record, name=new(name)) for name, record in self.records.items()},
            aliases={new(name): new(target) for name, target in self.aliases.items()},
            guards={new(name) for name in self.guards},
        )

    # Reading.

    def plain_names(self) -> Iterator[str]:
        """Yield the names of tensors that are not quantized, including aliases."""
        parts = {name for record in self.records.values() for name in record.tensor_names} | self.guards
        yield from (name for name in self.entries if name not in parts)
        yield from (name for name in self.aliases if name not in self.records)

    def entry(self, name: str) -> Entry:
        """Return the stored tensor called ``name``, or the one that ``name`` is an alias of."""
        return self.entries[self.aliases.get(name, name)]

    @property
    def has_plain_bytes(self) -> bool:
        """Whether the tensors of a weight are stored as they are: not in imported files."""
        return type(self) is Archive

    def handle(self, name: str) -> BinaryIO:
        """The open file that holds a stored tensor."""
        return self._handles[self.shards[name]]

    def read(self, name: str) -> Tensor:
        """Read a tensor that is not quantized into new memory on the CPU."""
        stored = self.aliases.get(name, name)
        return read_tensor(self._handles[self.shards[stored]], self.entries[stored], self.shards[stored])

    def global_scale(self, name: str) -> Tensor | None:
        """Read the global scale of a quantized weight, float32 ``()``, without its codes; None if it has none."""
        part = f"{self.aliases.get(name, name)}.global_scale"
        return self.read(part) if part in self.entries else None

    def quantized(self, name: str) -> QTensor:
        """Read a quantized weight into new memory on the CPU and validate its values."""
        record = self.records[self.aliases.get(name, name)]
        tensors = {part.rpartition(".")[2]: self.read(part) for part in record.tensor_names}
        return build_weight(record, tensors, self.shards[record.tensor_names[0]])

    def calibrated_names(self, name: str) -> dict[str, dict[str, str]]:
        """The names of a weight's calibrated tensors: ``{"input": {"scale": ..., ...}, "output": ...}``."""
        scheme, layer = self.records[name].scheme, name.rpartition(".")[0]
        found = {"input": static_parameters(scheme.activation), "output": static_parameters(scheme.output)}
        start = f"{layer}." if layer else ""
        return {part: {key: f"{start}{part}_{key}" for key in keys} for part, keys in found.items() if keys}

    def scheme(self, name: str) -> Scheme:
        """The scheme of a quantized weight with its calibrated numbers. Raises `CheckpointError` if one is missing."""
        scheme = self.records[name].scheme
        for part, names in self.calibrated_names(name).items():
            missing = next((tensor for tensor in names.values() if tensor not in self.entries), None)
            if missing is not None:
                raise file_error(self.path, f"its scheme {scheme} needs {shown(missing)!r}.", tensor=name)
            field_name = "activation" if part == "input" else "output"
            given = {key: self.read(tensor) for key, tensor in names.items()}
            try:
                filled = with_static_parameters(getattr(scheme, field_name), given)
            except FormatError as error:
                raise file_error(self.path, str(error), tensor=names["scale"]) from None
            scheme = replace(scheme, **{field_name: filled})
        return scheme


def _merge(into: dict[str, _T], new: dict[str, _T], path: Path) -> None:
    for name, value in new.items():
        if into.setdefault(name, value) != value:
            raise file_error(path, "its metadata differs from that in another shard.", _REWRITE, name)


@dataclass(frozen=True)
class Index:
    """The index of a sharded directory. ``save``: the id of the save that wrote it, empty for other tools."""

    path: Path
    weight_map: dict[str, str]
    save: str


def _fingerprint(path: Path) -> object:
    """Return a value that changes whenever the checkpoint is replaced."""
    try:
        files = path.glob("*.safetensors*") if path.is_dir() else iter([path])
        return sorted(identity for file in files if (identity := _identity(file)))
    except (OSError, ValueError):  # also for a path with a null character
        return None


def _identity(file: Path) -> tuple[str, int, int, int] | None:
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return file.name, stat.st_ino, stat.st_mtime_ns, stat.st_size


def find_files(path: Path) -> tuple[list[Path], Index | None]:
    """Return the safetensors files of a checkpoint and its index, if it has one."""
    if not path.exists():
        raise file_error(path, "there is no such file or directory.", "Check the path.")
    if not path.is_dir():
        if not path.is_file():
            raise file_error(path, "it is not a regular file.", "Pass a .safetensors file or a directory with one.")
        return [path], None
    place = _locate(path)
    if not place.name.endswith(".json"):
        return [place], None
    index = _read_index(place)
    return [path / shard for shard in sorted(set(index.weight_map.values()))], index


def _locate(directory: Path) -> Path:
    """Return the index or the single file of a directory; the standard names take precedence."""
    usual = next((directory / name for name in (INDEX, SINGLE) if (directory / name).is_file()), None)
    found = usual or _single_match(directory, "*.safetensors.index.json") or _single_match(directory, "*.safetensors")
    if found is None:
        raise _missing_error(directory)
    return found


def _missing_error(path: Path) -> CheckpointError:
    what, found = f"it holds neither {INDEX} nor {SINGLE}", first_foreign(sorted(path.iterdir()))
    if found is None:
        return file_error(path, f"{what}.", "Pass the directory that holds the weights.")
    file, kind = found
    return file_error(path, f"{what}, but {shown(file.name)}, which is {kind.what}.", kind.remedy)


def _single_match(directory: Path, pattern: str) -> Path | None:
    found = [file for file in sorted(directory.glob(pattern)) if file.is_file()]
    if any(_is_shard(file.name) for file in found):
        what = f"it holds shards ({shown(found[0].name)}) but no index: a save or download was interrupted."
        raise file_error(directory, what, "Save, copy or download the directory again.")
    if len(found) > 1:
        names = ", ".join(shown(file.name) for file in found[:4])
        raise file_error(directory, f"it holds several checkpoints: {names}.", "Pass the path of one of them.")
    return found[0] if found else None


def _read_index(path: Path) -> Index:
    with path.open("rb") as file:
        text = file.read(MAX_HEADER + 1)
    if len(text) > MAX_HEADER:
        raise file_error(path, f"it is longer than {MAX_HEADER} bytes.")
    tree = parse_json(text, path, "index")
    weight_map, notes = tree.get("weight_map"), tree.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise file_error(path, "it holds no weight_map.")
    _check_shards(path, weight_map)
    save = notes.get(SAVE, "") if isinstance(notes, dict) else ""
    return Index(path, weight_map, save if isinstance(save, str) else quoted(save))


def _check_shards(path: Path, weight_map: dict[str, object]) -> None:
    shards: set[str] = set()
    for name, shard in weight_map.items():
        if isinstance(shard, str) and shard in shards:
            continue
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise file_error(path, f"its shard {quoted(shard)} is not a file name in this directory.", _REWRITE, name)
        shards.add(shard)
    for shard in sorted(shards):
        if not (path.parent / shard).is_file():
            what = f"its shard {shown(shard)!r} is not in the directory."
            raise file_error(path, what, "Copy or download the missing file.")


def _is_shard(name: str) -> bool:
    """Whether a file name is that of one shard among several."""
    match = re.search(r"-\d{5,9}-of-(\d{5,9})\.safetensors$", name)
    return match is not None and int(match[1]) > 1


def _is_plain_name(shard: str) -> bool:
    return (
        len(shard) <= 255 and shard.endswith(".safetensors") and not set(shard) & set("/\\:\0") and shard.isprintable()
    )
