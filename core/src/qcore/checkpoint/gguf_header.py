"""The header of a GGUF file: metadata and the position of each tensor. Nothing in it is trusted.

Layout, little endian (versions 2 and 3): magic ``GGUF``, uint32 version, uint64 number of tensors, uint64 number of
metadata entries; the entries (key, uint32 type, value); the tensors (name, uint32 number of dimensions, uint64
dimensions with the fastest first, uint32 type, uint64 offset); then, at a multiple of ``general.alignment``, the data.
Texts are a uint64 length and bytes.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError
from .header import DOWNLOAD_AGAIN, MAX_SIZE, file_error, shown

MAGIC = b"GGUF"
_VERSION = 3
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_MOST_ITEMS = 1 << 24
"""Maximum number of entries, tensors and elements of an array: vocabularies have 2**18 tokens."""
_LONGEST = 1 << 24
"""Maximum bytes of a text: chat templates have a few thousand."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_DEPTH = 4


@dataclass(frozen=True)
class GGUFTensor:
    """``shape``: slowest dimension first; ``kind``: number of the type; ``start``: of its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class GGUFHeader:
    """The part of a file before its data.

    **Fields:** ``metadata``: numbers, texts and lists by key; long lists, such as vocabularies, are omitted;
    ``pairs``: start and end of the bytes of all metadata, and the number of entries; ``alignment``: of the data.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    pairs: tuple[int, int, int]
    alignment: int


def read_gguf_header(file: BinaryIO, path: Path) -> GGUFHeader:
    """Read and check the header. Raises `CheckpointError` for a damaged one and for big-endian files."""
    reader = _Reader(file, path)
    if reader.take(4) != MAGIC:
        raise file_error(path, "it is not a GGUF file.")
    version = reader.number("I")
    if version not in (2, 3):
        big = version in (2 << 24, 3 << 24)
        what = "it is big-endian" if big else f"it has GGUF version {version}"
        raise file_error(path, f"{what}; qcore reads versions 2 and 3, little-endian.", "Convert it with llama.cpp.")
    count, entries = reader.count("tensors"), reader.count("metadata entries")
    metadata, start = {}, file.tell()
    for _ in range(entries):
        key = reader.text()
        if key in metadata:  # readers disagree about which one counts
            raise file_error(path, f"its metadata has the key {shown(key)!r} twice.")
        metadata[key] = reader.value(reader.number("I"))
    pairs = start, file.tell(), entries
    infos = [_info(reader) for _ in range(count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment % 8:
        raise file_error(path, f"its alignment is {str(alignment)[:20]}.")
    base = -(-file.tell() // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise file_error(path, "the file has two tensors with that name.", tensor=name)
        if offset % alignment or base + offset > reader.size:
            raise file_error(path, f"its offset {offset} is outside the file or not aligned.", tensor=name)
        tensors[name] = GGUFTensor(name, shape, kind, base + offset)
    return GGUFHeader(metadata, tensors, pairs, alignment)


@dataclass(frozen=True)
class GGUFSpec:
    """A tensor to write: ``shape`` slowest dimension first, ``kind`` the number of its type, ``nbytes`` of its data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    nbytes: int


@dataclass(frozen=True)
class GGUFPairs:
    """Metadata to write: ``raw``, the bytes of ``count`` entries; ``alignment``: of the data, as stated in them."""

    raw: bytes
    count: int
    alignment: int = _ALIGNMENT


def build_gguf_header(pairs: GGUFPairs, tensors: Sequence[GGUFSpec]) -> bytes:
    """The bytes before the data, up to the first tensor; each tensor begins at a multiple of the alignment."""
    infos, offset = bytearray(), 0
    for tensor in tensors:
        name, dims = tensor.name.encode(), tensor.shape[::-1]
        infos += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        infos += struct.pack("<IQ", tensor.kind, offset)
        offset += tensor.nbytes + padding(tensor.nbytes, pairs.alignment)
    found = struct.pack("<4sIQQ", MAGIC, _VERSION, len(tensors), pairs.count) + pairs.raw + infos
    return found + bytes(padding(len(found), pairs.alignment))


def padding(nbytes: int, alignment: int) -> int:
    """The number of padding bytes up to a multiple of ``alignment``."""
    return -nbytes % alignment


def _info(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name, dims = reader.text(), reader.number("I")
    if not 0 < dims <= _MOST_DIMENSIONS:
        raise file_error(reader.path, f"it has {dims} dimensions.", tensor=name)
    shape = tuple(reader.number("Q") for _ in range(dims))[::-1]
    if any(size > MAX_SIZE for size in shape) or math.prod(shape) > MAX_SIZE:
        raise file_error(reader.path, f"its shape {shape} is impossible.", tensor=name)
    return name, shape, reader.number("I"), reader.number("Q")


class _Reader:
    """Reads values; raises `CheckpointError` if the file ends."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size

    def take(self, count: int) -> bytes:
        found = self.file.read(count) if count <= self.size else b""
        if len(found) != count:
            raise file_error(self.path, "the file ends inside its header.", DOWNLOAD_AGAIN)
        return found

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]

    def count(self, what: str) -> int:
        # Each takes some bytes, so that the size of the file bounds their number, too.
        found: int = self.number("Q")
        if found > min(_MOST_ITEMS, self.size):
            raise file_error(self.path, f"it claims to hold {found:,} {what}.", DOWNLOAD_AGAIN)
        return found

    def text(self, errors: str = "strict") -> str:
        length = self.number("Q")
        if length > _LONGEST:
            raise self._damaged(f"a text of {length:,} bytes")
        try:
            return self.take(length).decode("utf-8", errors=errors)
        except UnicodeDecodeError:
            raise self._damaged("a text that is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text(errors="replace")  # those of vocabularies need not be UTF-8
        if kind != _ARRAY or depth >= _DEPTH:
            raise self._damaged(f"a value of type {kind}")
        inner, length = self.number("I"), self.count("elements of an array")
        if inner in _SCALARS:
            raw = self.take(struct.calcsize(f"<{_SCALARS[inner]}") * length)
            return list(struct.unpack(f"<{length}{_SCALARS[inner]}", raw)) if length <= 1 << 16 else None
        found = [self.value(inner, depth + 1) for _ in range(length)]
        return found if length <= 1 << 10 else None

    def _damaged(self, what: str) -> CheckpointError:
        return file_error(self.path, f"its header holds {shown(what)}.", DOWNLOAD_AGAIN)
