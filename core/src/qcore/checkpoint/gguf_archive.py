"""A GGUF file as an `Archive` with the weights of transformers' models."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .archive import Archive
from .gguf_header import MAGIC, GGUFHeader, GGUFPairs, GGUFSpec, build_gguf_header, padding, read_gguf_header
from .header import Entry, file_error
from .imported import ImportedArchive
from .importers.gguf import PLAIN_KINDS, PLAIN_TYPES, UNUSED_TENSORS, plan_gguf, row_bytes
from .values import as_bytes

_SUFFIX = ".gguf"
METADATA = f"metadata{_SUFFIX}"
"""A side file of a checkpoint that was GGUF: its metadata, and the tensors that models of transformers compute."""


def gguf_file_of(path: Path) -> Path | None:
    """The GGUF file that a path names, or the only one in a directory without safetensors; None if there is none."""
    if path.is_file():
        with path.open("rb") as file:
            return path if file.read(len(MAGIC)) == MAGIC or path.suffix == _SUFFIX else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    found = sorted(file for file in path.glob(f"*{_SUFFIX}") if file.is_file())  # a pipe would keep its reader waiting
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4])
        raise file_error(path, f"it holds several GGUF files: {names}.", "Pass the path of one of them.")
    return found[0] if found else None


def open_gguf(path: Path, stack: ExitStack) -> ImportedArchive:
    """Open a GGUF file, which stays open until ``stack`` is closed. Raises `CheckpointError`."""
    file = stack.enter_context(path.open("rb"))
    header = read_gguf_header(file, path)
    parts = header.metadata.get("split.count")
    if type(parts) is int and parts > 1:
        what = f"it is one of the {parts} parts of a split file."
        raise file_error(path, what, "Merge them with llama.cpp: llama-gguf-split --merge FIRST_PART MERGED.")
    archive = _raw(path, file, header)
    return ImportedArchive.of(archive, "gguf", plan_gguf(header, archive.entries, path))


@dataclass(frozen=True)
class Description:
    """The contents of a GGUF file besides the weights.

    **Fields:** ``metadata``: as in `GGUFHeader`; ``pairs``: all metadata, encoded; ``computed``: tensors that models of
    transformers compute, by name.
    """

    metadata: Mapping[str, Any]
    pairs: GGUFPairs
    computed: Mapping[str, Tensor]


def describe_gguf(path: Path) -> Description:
    """Read the description of the model in a GGUF file. Raises `CheckpointError`."""
    with path.open("rb") as file:
        header = read_gguf_header(file, path)
        archive = _raw(path, file, header)
        computed = {name: archive.read(name) for name in UNUSED_TENSORS if name in archive.entries}
        start, end, count = header.pairs
        file.seek(start)
        return Description(header.metadata, GGUFPairs(file.read(end - start), count, header.alignment), computed)


def description_bytes(found: Description) -> bytes:
    """The bytes of a GGUF file that holds only this description, for `METADATA`."""
    specs = [GGUFSpec(n, tuple(t.shape), PLAIN_KINDS[t.dtype], t.nbytes) for n, t in found.computed.items()]
    file = io.BytesIO(build_gguf_header(found.pairs, specs))
    file.seek(0, io.SEEK_END)
    for tensor in found.computed.values():
        file.write(as_bytes(tensor))
        file.write(bytes(padding(tensor.nbytes, found.pairs.alignment)))
    return file.getvalue()


def _raw(path: Path, file: BinaryIO, header: GGUFHeader) -> Archive:
    """The stored tensors, undecoded: blocks as uint8 ``(..., N, bytes of a row)``."""
    archive = Archive(path, [path])
    archive._handles[path] = file  # noqa: SLF001 - another kind of file of the same class
    size = path.stat().st_size
    for tensor in header.tensors.values():
        width = row_bytes(tensor, path)
        dtype = PLAIN_TYPES.get(tensor.kind, torch.uint8)
        last = tensor.shape[-1] if tensor.kind in PLAIN_TYPES else width
        shape = (*tensor.shape[:-1], last)
        nbytes = width * math.prod(tensor.shape[:-1])
        if tensor.start + nbytes > size:
            raise file_error(path, f"its {nbytes:,} bytes extend beyond the end of the file.", tensor=tensor.name)
        archive.entries[tensor.name] = Entry(tensor.name, dtype, shape, tensor.start, nbytes)
        archive.shards[tensor.name] = path
    _check_overlaps(archive)
    return archive


def _check_overlaps(archive: Archive) -> None:
    """Raise if two tensors share bytes: a small file could claim to hold any number of them."""
    end = 0
    for entry in sorted(archive.entries.values(), key=lambda entry: (entry.start, entry.nbytes)):
        if entry.nbytes and entry.start < end:
            raise file_error(archive.path, "its bytes overlap with those of another tensor.", tensor=entry.name)
        end = max(end, entry.start + entry.nbytes)
