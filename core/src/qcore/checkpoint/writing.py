"""Write a checkpoint atomically: plan its shards from shapes alone, then stream the values.

A file, or a new directory, is written under a temporary name, flushed to disk and renamed. An existing directory keeps
its old checkpoint until the new one is complete. New shards get names that no earlier save used: a reader of the old
index finds either the old shards, or none and then reads the new index. See `archive` for the reader.

A directory that is replaced with everything in it is exchanged for the new one in one step. Where that is impossible,
the new files are renamed into it, and for this time it has no ``config.json``: other tools cannot read it, instead of
reading the weights of one checkpoint with the settings of another.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .._version import __version__
from ..errors import CheckpointError
from .archive import INDEX, SINGLE
from .exchanging import can_be_replaced, exchange, make_alike
from .header import MAX_HEADER, TensorSpec, build_header, file_error, shown
from .model_config import CONFIG
from .records import IMPORT_FIRST, SAVE, Record, write_notes
from .staging import (
    Rights,
    appeared_error,
    clean,
    create,
    new_id,
    publish_lock,
    remove,
    replace_atomically,
    save_id_of,
    staging,
    sync,
    temporaries,
)
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
_SHARD_NAME = re.compile(r"model-((?P<save>[0-9a-f]{12})-)?\d{5,}-of-\d{5,}\.safetensors")
_STEM = "model"
_SIDE_FILES = f"{INDEX}.beside"


@dataclass(frozen=True)
class Unit:
    """Tensors that stay in one file: one plain tensor, or all tensors of a quantized weight.

    ``fetch``: computes the values just before they are written, in the order of ``specs``.
    """

    name: str
    specs: tuple[TensorSpec, ...]
    fetch: Callable[[], Sequence[Tensor]]
    record: Record | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the unit."""
        return sum(spec.nbytes for spec in self.specs)


@dataclass(frozen=True)
class Aliases:
    """Alias to stored name (``targets``), and the records of aliases of quantized weights.

    ``part``: "rank of ranks" if the tensors are one rank's part of a model.
    """

    targets: Mapping[str, str]
    records: Mapping[str, Record]
    part: str = ""

    def notes(self, units: Iterable[Unit], save: str = "") -> dict[str, str]:
        """Build the metadata of a file that holds ``units``."""
        held = list(units)
        names = {unit.name for unit in held}
        here = {name: target for name, target in self.targets.items() if target in names}
        tied = [self.records[name] for name in here if name in self.records]
        return write_notes([*(unit.record for unit in held if unit.record), *tied], here, save, self.part)


def guards(units: Iterable[Unit], remedy: str = IMPORT_FIRST) -> list[Unit]:
    """Empty tensors that prevent transformers without `qcore.hf` from giving quantized weights random values.

    One has the name of the first quantized weight, whose size transformers rejects; the other one's name is ``remedy``.
    """
    first = next((unit.record.parameter for unit in units if unit.record is not None), None)
    names = () if first is None else (first, remedy)
    return [Unit(f"{name} (guard)", (TensorSpec(name, torch.float16, (0,)),), _nothing) for name in names]


def _nothing() -> list[Tensor]:
    return [torch.empty(0, dtype=torch.float16)]


OnUnit = Callable[[Unit], None]


def shard_limit(size: int | str | None) -> int | None:
    """Parse a number of bytes, or a text such as ``"5GB"`` or ``"500MiB"``. Raises `CheckpointError`."""
    match = (
        re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?) *([KMGT]I?B)?", size.strip().upper())
        if isinstance(size, str)
        else None
    )
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


def write_file(path: Path, units: Sequence[Unit], aliases: Aliases, on_unit: OnUnit, *, overwrite: bool = True) -> None:
    """Write one safetensors file atomically. Raises `CheckpointError` if two tensors would have one name.

    ``overwrite``: as for `replace_atomically`.
    """
    _check_names(path, units)
    with replace_atomically(path, overwrite=overwrite) as file:
        _write_units(file, path, units, aliases.notes(units), on_unit)


def _check_names(path: Path, units: Sequence[Unit]) -> None:
    """Raise `CheckpointError` for a tensor with a name that belongs to a quantized weight, or to another tensor."""
    records = [unit.record for unit in units if unit.record]
    # All but the name of the weight itself, which a guard may have.
    taken = {name: record.name for record in records for name in record.other_names if name != record.name}
    for unit in units:
        for spec in unit.specs:
            other = taken.setdefault(spec.name, unit.name)
            if other != unit.name:
                what = f"the name belongs to {shown(other)!r}, which is stored as several tensors."
                raise file_error(path, what, "Rename one of the two in the source, or do not quantize it.", spec.name)


def _write_units(file: BinaryIO, path: Path, units: Sequence[Unit], notes: Mapping[str, str], on_unit: OnUnit) -> None:
    header, starts = build_header((spec for unit in units for spec in unit.specs), notes)
    if len(header) - 8 > MAX_HEADER:
        what = f"its header would take {len(header):,} bytes; the limit is {MAX_HEADER:,}."
        raise file_error(path, what, "Split it: pass a directory and max_shard_size.")
    file.write(header)
    for unit in units:
        _write_unit(file, unit, starts)
        on_unit(unit)


def _write_unit(file: BinaryIO, unit: Unit, starts: Mapping[str, int]) -> None:
    for spec, value in zip(unit.specs, unit.fetch(), strict=True):
        tensor = storable(value)
        assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), spec
        file.seek(starts[spec.name])
        file.write(as_bytes(tensor))


def write_directory(
    path: Path,
    shards: Sequence[Sequence[Unit]],
    aliases: Aliases,
    on_unit: OnUnit,
    *,
    side_files: Mapping[str, Path] | None = None,
    exclusive: bool = False,
    overwrite: bool = True,
) -> None:
    """Write shards and index into a new or existing directory.

    ``side_files``: further files to copy, by their names in the directory; ``exclusive``: remove all other files of an
    existing directory; ``overwrite``: whether there may be one. Raises `CheckpointError` if there is nevertheless, and
    if two tensors would have one name.
    """
    _check_names(path, [unit for shard in shards for unit in shard])
    save = new_id()
    saver = _DirectorySave(path, shards, aliases, on_unit, side_files or {}, save)
    clean(path.parent, path.name)
    if path.is_dir():
        if not overwrite:
            raise appeared_error(path)
        clean(path)
        beside = exclusive and can_be_replaced(path)
        with staging(path if beside else path / _STEM, save, mode=0o700) as stage:
            saver.write(stage, Rights.of(*_files_of(path)))
            if beside:
                saver.arrange(stage)
            saver.publish(stage, exclusive=exclusive)
        return
    with staging(path, save) as stage:
        saver.write(stage, None)
        saver.arrange(stage)
        _put_in_place(stage, saver, exclusive=exclusive)


def _put_in_place(stage: Path, saver: _DirectorySave, *, exclusive: bool) -> None:
    try:
        stage.rename(saver.path)
    except OSError:
        if not saver.path.is_dir():
            raise
        if exclusive:
            raise appeared_error(saver.path) from None
        # Another save created the directory meanwhile: this one replaces its checkpoint.
        saver.publish(stage, exclusive=False)
    sync(saver.path.parent)


class _DirectorySave:
    """One save into a directory: all files are complete before the first of them is renamed into place.

    One atomic step switches readers from the old checkpoint to the new one: for shards, the renaming of the index; for
    a single file, the removal of the old index or the renaming over the old file.
    """

    def __init__(
        self,
        path: Path,
        shards: Sequence[Sequence[Unit]],
        aliases: Aliases,
        on_unit: OnUnit,
        side_files: Mapping[str, Path],
        save: str,
    ) -> None:
        self.path, self.shards, self.aliases, self.on_unit, self.save = path, shards, aliases, on_unit, save
        self.side_files = side_files
        self.arranged = False
        usual = shard_names(len(shards))
        self.names = dict(zip(usual, usual, strict=True))
        """Name of a shard in the staging directory to its final name."""

    @property
    def single(self) -> bool:
        """Whether the checkpoint is one file without an index."""
        return len(self.shards) == 1

    def write(self, stage: Path, rights: Rights | None) -> None:
        """Write all files to ``stage``."""
        self.rights = rights
        for name, units in zip(self.names, self.shards, strict=True):
            with create(stage / name, rights) as file:
                notes = self.aliases.notes(units, "" if self.single else self.save)
                _write_units(file, self.path, units, notes, self.on_unit)
                file.flush()
                os.fsync(file.fileno())
        for name, source in self.side_files.items():
            place = stage / _SIDE_FILES / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)
            with place.open("rb+") as copied:
                os.fsync(copied.fileno())

    def arrange(self, stage: Path) -> None:
        """Name all files in ``stage``, which is beside the directory, as they are named in it."""
        if not _is_free(self.path, self.names):
            self._choose_new_names()
        self.rename_files(stage, stage)
        self._put_side_files(stage, stage)
        self.names = {name: name for name in self.names.values()}
        self.arranged = True

    def _choose_new_names(self) -> None:
        start = f"model-{self.save}"
        if not self.single:
            self.names = {n: name if start in name else f"{start}{name[5:]}" for n, name in self.names.items()}

    def publish(self, stage: Path, *, exclusive: bool) -> None:
        """Replace the checkpoint in the directory by the files in ``stage``."""
        with publish_lock(self.path) as locked:
            if self.arranged and exclusive and self._exchange(stage):
                return
            if not (locked and _is_free(self.path, self.names)):
                self._choose_new_names()
            old, config = _identity(self.path / SINGLE), self.path / CONFIG
            hidden = stage / f"{CONFIG}.old"
            if exclusive and config.is_file():
                config.rename(hidden)
            try:
                self.rename_files(stage, self.path)
            except BaseException:
                if not self._roll_back(old) and hidden.is_file():
                    hidden.rename(config)
                raise
            sync(self.path)
            self._remove_stale(old, exclusive=exclusive)
            self._put_side_files(stage, self.path)

    def _exchange(self, stage: Path) -> bool:
        """Exchange the directory for ``stage``; returns whether it was done: not while other saves write into it."""
        sync(stage)
        if temporaries(self.path) or not make_alike(stage, self.path) or not exchange(stage, self.path):
            return False
        sync(self.path.parent)
        return True

    def _put_side_files(self, stage: Path, directory: Path) -> None:
        """Rename the side files into ``directory``; the configuration comes last."""
        waiting = stage / _SIDE_FILES if (stage / _SIDE_FILES).is_dir() else stage
        for name in sorted(self.side_files, key=lambda name: name == CONFIG):
            if waiting / name != directory / name:
                _replace(waiting / name, directory, Path(name))
        if waiting != stage:
            remove(waiting)

    def rename_files(self, stage: Path, directory: Path) -> None:
        """Rename the weights of ``stage`` into ``directory``; the atomic switch comes last."""
        for waiting, name in self.names.items():
            if stage / waiting != directory / name:
                (stage / waiting).replace(directory / name)
        if self.single:
            sync(directory)
            (directory / INDEX).unlink(missing_ok=True)
            return
        self._write_index(stage / f"{INDEX}.new")
        sync(directory)
        (stage / f"{INDEX}.new").replace(directory / INDEX)
        sync(directory)

    def _write_index(self, path: Path) -> None:
        held = dict(zip(self.names.values(), self.shards, strict=True))
        weight_map = {spec.name: name for name, units in held.items() for unit in units for spec in unit.specs}
        total = sum(unit.nbytes for units in self.shards for unit in units)
        notes = {"total_size": total, "qcore": __version__, SAVE: self.save}
        tree = {"metadata": notes, "weight_map": dict(sorted(weight_map.items()))}
        path.unlink(missing_ok=True)
        with create(path, self.rights) as file:
            file.write(json.dumps(tree, indent=2).encode())
            file.flush()
            os.fsync(file.fileno())

    def _roll_back(self, old: object) -> bool:
        """Remove files that were already renamed, unless the switch to the new checkpoint was done; whether it was."""
        index = self.path / INDEX
        if self.single:
            changed = _identity(self.path / SINGLE) != old
            # With an index, readers ignore the single file; without one, it is the checkpoint.
            if index.exists() and changed:
                remove(self.path / SINGLE)
                changed = False
            return changed
        switched = _save_in(index) == self.save
        if not switched:
            for name in self.names.values():
                remove(self.path / name)
        return switched

    def _remove_stale(self, old: object, *, exclusive: bool) -> None:
        """Remove the files of the previous checkpoint, and shards of saves that did not finish.

        Files that another running save renamed meanwhile are kept. Open files stay readable.
        """
        kept = {INDEX, *self.names.values(), *_shards_in(self.path / INDEX)}
        living = {save_id_of(temporary) for temporary in temporaries(self.path)} - {self.save}
        for file in self.path.glob("model*.safetensors"):
            match = _SHARD_NAME.fullmatch(file.name)
            if file.name not in kept and match and match["save"] not in living:
                remove(file)
        if not self.single and old is not None and _identity(self.path / SINGLE) == old:
            remove(self.path / SINGLE)
        if exclusive:
            self._remove_others(kept)

    def _remove_others(self, kept: set[str]) -> None:
        stay = {self.path / name for name in (*kept, *self.side_files)}
        stay |= {parent for path in stay for parent in path.parents}
        for path in sorted(self.path.rglob("*"), key=lambda path: len(path.parts)):
            if path not in stay and save_id_of(self.path / path.relative_to(self.path).parts[0]) is None:
                remove(path)


def shard_names(count: int) -> list[str]:
    """Return the standard names: ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _is_free(directory: Path, names: Iterable[str]) -> bool:
    """Whether the directory holds no checkpoint whose readers could mistake files with these names for their own."""
    return not any((directory / name).exists() for name in (INDEX, SINGLE, *names))


def _identity(path: Path) -> object:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _replace(source: Path, directory: Path, name: Path) -> None:
    """Rename a file to ``name`` in ``directory``, and nowhere else: links in the place of its folders are removed."""
    for folder in reversed(name.parents):
        place = directory / folder
        if place != directory and (place.is_symlink() or place.is_file()):
            remove(place)
    target = directory / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        remove(target)
    source.replace(target)


def _index_in(path: Path) -> Mapping[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _save_in(index: Path) -> object:
    notes = _index_in(index).get("metadata")
    return notes.get(SAVE) if isinstance(notes, dict) else None


def _shards_in(index: Path) -> set[str]:
    found = _index_in(index).get("weight_map")
    return {name for name in found.values() if isinstance(name, str)} if isinstance(found, dict) else set()


def _files_of(directory: Path) -> list[Path]:
    """Return the files of the checkpoint in a directory."""
    index = directory / INDEX
    return (
        [index, *(directory / name for name in sorted(_shards_in(index)))] if index.exists() else [directory / SINGLE]
    )


@contextlib.contextmanager
def translate_os_errors(path: Path) -> Iterator[None]:
    """Convert operating-system errors (disk full, missing permissions) to a `CheckpointError` that names the target."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise file_error(
            path, f"cannot be written: {reason}.", "Nothing was left behind; free disk space or choose another target."
        ) from error
