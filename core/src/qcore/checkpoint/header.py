"""Read and write the header of a safetensors file: name, dtype, shape and byte offsets of its tensors.

The safetensors library is not used here: it maps whole files (some systems refuse that for a checkpoint larger than
memory), and can only write tensors that are all in memory at once. Every header accepted here is accepted by the
library, too; tests verify that.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from ..errors import CheckpointError, clipped, quoted
from .foreign import kind_of

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""Name of a dtype in the file to torch dtype."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER = 100_000_000
"""The longest header, in bytes, that the safetensors library accepts."""
MAX_SIZE = 1 << 48
"""Upper bound for a dimension and for a number of elements, so that arithmetic with shapes cannot overflow."""

DOWNLOAD_AGAIN = "The file is truncated or damaged: copy or download it again."
_SURROGATE = re.compile("[\ud800-\udfff]")
_KEYS = {"dtype", "shape", "data_offsets"}


def file_error(path: Path, what: str, remedy: str = DOWNLOAD_AGAIN, tensor: str = "") -> CheckpointError:
    """Build an error with the path, the tensor if any, the problem and the remedy."""
    where = f"{path}: tensor {shown(tensor)!r}" if tensor else f"{path}"
    return CheckpointError(f"{where}: {clipped(what, 700)}\n{clipped(remedy, 400)}")


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Convert errors of the operating system (missing permissions, a long name) to `CheckpointError`."""
    try:
        yield
    except OSError as error:
        remedy = "Check the path and the permissions."
        raise file_error(path, f"cannot be read: {error.strerror or error}.", remedy) from error


def shown(name: str) -> str:
    """Format a name from an untrusted file for errors and tables: shortened, without terminal control characters."""
    text = name if name.isprintable() else ascii(name[:200])
    return text if len(text) <= 120 else f"{text[:60]}...{text[-40:]}"


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's values."""
        return math.prod(self.shape) * self.dtype.itemsize


class Entry(NamedTuple):
    """A stored tensor and its place. ``start``: offset of its first byte in the file; ``nbytes``: of its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The header of a file. ``metadata``: texts by name; ``entries``: tensors by name."""

    metadata: dict[str, str]
    entries: dict[str, Entry]


def parse_json(text: bytes, path: Path, what: str, *, constants: bool = False) -> dict[str, Any]:
    """Parse a JSON object from an untrusted file. Raises `CheckpointError`, also for duplicate and invalid keys.

    ``constants``: accept NaN, Infinity and -Infinity, which Python's json writes to configurations of models.
    """
    refuse = None if constants else _no_constant
    try:
        tree = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise file_error(path, f"its {what} is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(tree, dict):
        raise file_error(path, f"its {what} is a JSON {type(tree).__name__}; it must be an object.")
    if b"\\u" in text:  # only an escape can produce a lone surrogate
        _check_names(tree, path)
    return tree


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection, which would repeatedly scan hundreds of thousands of new objects for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {counts.most_common(1)[0][0][:80]!r} occurs twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def read_header(file: BinaryIO, path: Path) -> Header:
    """Read and check the header of an open safetensors file. Raises `CheckpointError`."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > size - 8 or length > MAX_HEADER:
        raise _no_header(head, length, size, path)
    tree = parse_json(file.read(length), path, "header")
    metadata = _metadata(tree.pop("__metadata__", {}), path)
    entries = {name: _entry(name, value, 8 + length, path) for name, value in tree.items()}
    _check_layout(entries.values(), 8 + length, size, path)
    return Header(metadata, entries)


def _no_header(head: bytes, length: int, size: int, path: Path) -> CheckpointError:
    kind = kind_of(head, path)
    if kind is not None:
        return file_error(path, f"this is {kind.what}, not safetensors.", kind.remedy)
    return file_error(path, f"it is {size} bytes long, which cannot hold a header of {length} bytes.")


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise file_error(path, "its __metadata__ must map names to texts.")
    _check_names([*value, *value.values()], path)
    return value


def _check_names(names: Iterable[str], path: Path) -> None:
    for name in names:
        if _SURROGATE.search(name):
            raise file_error(path, "its name is not valid text.", tensor=name)


def is_size(value: Any) -> bool:
    """Whether ``value`` can be a dimension or an offset."""
    return type(value) is int and 0 <= value <= MAX_SIZE


def is_shape(value: Any) -> bool:
    """Whether ``value`` is a list of sizes whose product, ignoring zeros, is at most `MAX_SIZE`."""
    if not isinstance(value, list) or len(value) > 64:
        return False
    product = 1
    for n in value:
        if type(n) is not int or not 0 <= n <= MAX_SIZE:
            return False
        product *= n or 1
    return product <= MAX_SIZE


def _entry(name: str, value: Any, base: int, path: Path) -> Entry:
    if not isinstance(value, dict) or value.keys() != _KEYS:
        raise file_error(path, "its header entry must hold dtype, shape and data_offsets.", tensor=name)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise file_error(path, f"dtype {quoted(dtype)} is not known; known: {known}.", "Upgrade qcore.", name)
    if not is_shape(shape):
        raise file_error(path, f"shape {quoted(shape)} is impossible.", tensor=name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not (is_size(offsets[0]) and is_size(offsets[1])):
        raise file_error(path, f"data_offsets {quoted(offsets)} are impossible.", tensor=name)
    start, stop = offsets
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if stop - start != nbytes:
        what = f"{dtype} of shape {quoted(shape)} needs {nbytes} bytes, but its offsets span {stop - start}."
        raise file_error(path, what, tensor=name)
    return Entry(name, DTYPES[dtype], tuple(shape), base + start, nbytes)


def _check_layout(entries: Iterable[Entry], base: int, size: int, path: Path) -> None:
    """Raise unless the tensors fill the file without gaps and overlaps."""
    end = base
    for entry in sorted(entries, key=operator.itemgetter(3, 4)):
        if entry.start != end:
            raise file_error(path, f"its bytes start at {entry.start} instead of {end}.", tensor=entry.name)
        end += entry.nbytes
    if end != size:
        raise file_error(path, f"it is {size} bytes long, but its header describes {end}.")


def build_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Build the header of a file, and the offset of each tensor in the file.

    Tensors with wide dtypes come first, as in the safetensors library, so that every tensor is aligned.
    """
    ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    tree: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, offset = {}, 0
    for spec in ordered:
        stop = offset + spec.nbytes
        tree[spec.name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, stop]}
        starts[spec.name], offset = offset, stop
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in starts.items()}
