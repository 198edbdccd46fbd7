"""The head of a safetensors file: which tensors it holds, of which dtype and shape, at which bytes.

Read and written here rather than by the safetensors library, which maps whole files (a checkpoint larger than memory
is then refused by the system), writes only what is in memory as a whole, and needs numpy for it. What is accepted here
the library accepts as well; the tests hold both to that.
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
"""Element types by their name in the file."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER = 100_000_000
"""Bytes of the longest header that the safetensors library accepts."""
MAX_SIZE = 1 << 48
"""No dimension and no number of elements is larger: arithmetic with shapes cannot overflow."""

DOWNLOAD_AGAIN = "The file is truncated or damaged: copy or download it again."
_SURROGATE = re.compile("[\ud800-\udfff]")
_KEYS = {"dtype", "shape", "data_offsets"}


def file_error(path: Path, what: str, remedy: str = DOWNLOAD_AGAIN, tensor: str = "") -> CheckpointError:
    """The error that says what is wrong with a file, in which tensor, and what to do."""
    where = f"{path}: tensor {shown(tensor)!r}" if tensor else f"{path}"
    return CheckpointError(f"{where}: {clipped(what, 700)}\n{clipped(remedy, 400)}")


def shown(name: str) -> str:
    """A name from a file as errors and tables show it: cut where it is long, without what a terminal would obey."""
    text = name if name.isprintable() else ascii(name[:200])
    return text if len(text) <= 120 else f"{text[:60]}...{text[-40:]}"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as it is stored."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class Entry(NamedTuple):
    """A stored tensor and where it is. ``start``: of its first byte in the file; ``nbytes``: of its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What the head of a file says. ``metadata``: its texts; ``entries``: its tensors by name."""

    metadata: dict[str, str]
    entries: dict[str, Entry]


def parse_json(text: bytes, path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object from a file that is not trusted; a key that occurs twice, or is no text, is an error."""
    try:
        tree = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise file_error(path, f"its {what} is no valid JSON: {str(error)[:200]}.") from None
    if not isinstance(tree, dict):
        raise file_error(path, f"its {what} is a JSON {type(tree).__name__}; it must be an object.")
    if b"\\u" in text:  # nothing else makes half a character
        _check_names(tree, path)
    return tree


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """The collector looks at all objects again and again while hundreds of thousands are made; none is garbage."""
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
    raise ValueError(f"{text} is no JSON number")


def read_header(file: BinaryIO, path: Path) -> Header:
    """Read and check the head of an open safetensors file. Raises `CheckpointError`."""
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
            raise file_error(path, "its name is no valid text.", tensor=name)


def is_size(value: Any) -> bool:
    """Whether ``value`` can be a dimension or an offset."""
    return type(value) is int and 0 <= value <= MAX_SIZE


def is_shape(value: Any) -> bool:
    """Whether ``value`` is a list of sizes whose product, zeros aside, stays in bounds too."""
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
        what = f"{dtype} of shape {quoted(shape)} needs {nbytes} bytes; its offsets span {stop - start}."
        raise file_error(path, what, tensor=name)
    return Entry(name, DTYPES[dtype], tuple(shape), base + start, nbytes)


def _check_layout(entries: Iterable[Entry], base: int, size: int, path: Path) -> None:
    """Tensors follow each other without gap or overlap, and end where the file ends."""
    end = base
    for entry in sorted(entries, key=operator.itemgetter(3, 4)):
        if entry.start != end:
            raise file_error(path, f"its bytes start at {entry.start}, where {end} is expected.", tensor=entry.name)
        end += entry.nbytes
    if end != size:
        raise file_error(path, f"it is {size} bytes long; its header describes {end}.")


def build_header(parts: Iterable[TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The head of a file, and where each tensor starts in it.

    Wide element types come first, as the library does it, so that every tensor is aligned.
    """
    ordered = sorted(parts, key=lambda p: -p.dtype.itemsize)
    tree: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, offset = {}, 0
    for part in ordered:
        stop = offset + part.nbytes
        tree[part.name] = {"dtype": NAMES[part.dtype], "shape": list(part.shape), "data_offsets": [offset, stop]}
        starts[part.name], offset = offset, stop
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in starts.items()}
