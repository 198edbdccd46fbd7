"""Write a checkpoint: plan its shards from shapes alone, then stream the values; all of it appears, or nothing.

A file is written under a temporary name in its directory, synchronised to disk and renamed. A new directory is written
beside its place and renamed whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from .._version import __version__
from ..errors import CheckpointError
from .archive import INDEX, SINGLE
from .header import Part, build_header, problem
from .records import Record, write_notes
from .values import as_bytes, storable

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class Unit:
    """Tensors that stay in one file: one plain tensor, or all parts of a quantized weight.

    ``fetch`` makes the values when their turn comes, in the order of ``parts``.
    """

    name: str
    parts: tuple[Part, ...]
    fetch: Callable[[], Sequence[Tensor]]
    record: Record | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Aliases:
    """Names that stand for a stored one, and the records of those that are quantized."""

    targets: Mapping[str, str]
    records: Mapping[str, Record]

    def notes(self, units: Iterable[Unit]) -> dict[str, str]:
        """The metadata of a file that holds ``units``."""
        held = list(units)
        names = {unit.name for unit in held}
        here = {name: target for name, target in self.targets.items() if target in names}
        tied = [self.records[name] for name in here if name in self.records]
        return write_notes([*(unit.record for unit in held if unit.record), *tied], here)


OnUnit = Callable[[Unit], None]


def shard_limit(size: int | str | None) -> int | None:
    """Bytes from a number or a text such as ``"5GB"`` or ``"500MiB"``. Raises `CheckpointError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]I?B)?", size.strip().upper()) if isinstance(size, str) else None
    found = int(float(match[1]) * _UNITS[match[2] or ""]) if match else size
    if found is not None and (isinstance(found, (bool, float, str)) or found < 1):
        raise CheckpointError(f"max_shard_size is {size!r}; it must be a positive number of bytes, or e.g. '5GB'.")
    return found


def plan_shards(units: Iterable[Unit], limit: int | None) -> list[list[Unit]]:
    """Fill one shard after the other, in order. A unit larger than ``limit`` gets a shard of its own."""
    shards: list[list[Unit]] = [[]]
    filled = 0
    for unit in units:
        if limit is not None and shards[-1] and filled + unit.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += unit.nbytes
    return shards


def write_file(path: Path, units: Sequence[Unit], aliases: Aliases, on_unit: OnUnit) -> None:
    """Write one safetensors file atomically."""
    header, starts = build_header((part for unit in units for part in unit.parts), aliases.notes(units))
    with replacing(path) as file:
        file.write(header)
        for unit in units:
            _write_unit(file, unit, starts)
            on_unit(unit)


def _write_unit(file: BinaryIO, unit: Unit, starts: Mapping[str, int]) -> None:
    for part, value in zip(unit.parts, unit.fetch(), strict=True):
        tensor = storable(value)
        assert (tensor.dtype, tuple(tensor.shape)) == (part.dtype, part.shape), part
        file.seek(starts[part.name])
        file.write(as_bytes(tensor))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends well, and vanishes when it does not."""
    temporary = path.with_name(_temporary_name(path))
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _temporary_name(path: Path) -> str:
    return f".{path.name[:100]}.{secrets.token_hex(6)}.tmp"


def _sync_directory(path: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_directory(path: Path, shards: Sequence[Sequence[Unit]], aliases: Aliases, on_unit: OnUnit) -> None:
    """Write shards and index into a new or existing directory."""
    if path.is_dir():
        _write_into(path, shards, aliases, on_unit)
    else:
        with new_directory(path) as temporary:
            _write_into(temporary, shards, aliases, on_unit)


@contextlib.contextmanager
def new_directory(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A directory that appears at ``path``, whole, when the block ends well, and vanishes when it does not."""
    temporary = path.with_name(_temporary_name(path))
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _sync_directory(temporary)
        _move_into_place(temporary, path, overwrite=overwrite)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_directory(path.parent)


def _move_into_place(temporary: Path, path: Path, *, overwrite: bool) -> None:
    if not (overwrite and path.exists()):
        temporary.rename(path)
        return
    old = path.with_name(_temporary_name(path))
    path.rename(old)
    try:
        temporary.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old) if old.is_dir() else old.unlink()


def shard_names(count: int) -> list[str]:
    """The usual names: ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _write_into(directory: Path, shards: Sequence[Sequence[Unit]], aliases: Aliases, on_unit: OnUnit) -> None:
    """All files are complete before the first takes its name; without an index in between, nothing can be mixed up."""
    names = shard_names(len(shards))
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(_pending(directory / name)) for name in names}
        for name, units in zip(names, shards, strict=True):
            write_file(files[name], units, aliases, on_unit)
        index = stack.enter_context(_pending(directory / INDEX))
        if len(names) > 1:
            _write_index(index, dict(zip(names, shards, strict=True)))
        (directory / INDEX).unlink(missing_ok=True)
        for name, file in files.items():
            file.replace(directory / name)
        if len(names) > 1:
            index.replace(directory / INDEX)
        _remove_stale(directory, names)
    _sync_directory(directory)


@contextlib.contextmanager
def _pending(path: Path) -> Iterator[Path]:
    """A temporary name for ``path``; what is left under it at the end is removed."""
    temporary = path.with_name(_temporary_name(path))
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _write_index(path: Path, shards: Mapping[str, Sequence[Unit]]) -> None:
    weight_map = {part.name: name for name, units in shards.items() for unit in units for part in unit.parts}
    total = sum(unit.nbytes for units in shards.values() for unit in units)
    tree = {"metadata": {"total_size": total, "qcore": __version__}, "weight_map": dict(sorted(weight_map.items()))}
    with replacing(path) as file:
        file.write(json.dumps(tree, indent=2).encode())


def _remove_stale(directory: Path, names: Sequence[str]) -> None:
    """Shards of the checkpoint that stood here before."""
    for file in directory.glob("model*.safetensors"):
        if file.name not in names and (file.name == SINGLE or _SHARD_NAME.fullmatch(file.name)):
            file.unlink()


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what the system says (disk full, no rights) into a `CheckpointError` that names the target."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise problem(
            path, f"cannot be written: {reason}.", "Nothing was left behind; make room or choose another place."
        ) from error
