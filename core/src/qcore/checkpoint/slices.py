"""`StoredWeight`: a quantized weight on disk of which only a part is read, for ranks that hold a part each."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import FormatError
from ..formats import PLAIN, PLAIN_INT32, Format
from ..weights.parts import Part, parts
from ..weights.qtensor import QTensor
from .header import Entry, file_error
from .records import Record
from .values import as_bytes, build_weight

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from .archive import Archive


class StoredWeight:
    """A weight ``(N, K)`` in an open checkpoint; `narrow` reads a part of it.

    Has what cutting asks of a `QTensor`: ``shape``, ``format``, ``order``, ``dtype``, ``dim`` and ``narrow``. A weight
    whose bytes cannot be cut (an order, a layout of a third party, an imported file) is read whole, once.

    **Arguments:** ``archive``: open while this is used; ``name``: of the weight; ``device``: for the parts.
    """

    def __init__(self, archive: Archive, name: str, device: torch.device) -> None:
        self._archive, self._device = archive, device
        self._record = record = archive.records[archive.aliases.get(name, name)]
        self.shape, self.format = torch.Size(record.shape), record.format
        self._whole = None if _is_sliceable(archive, record) else archive.quantized(name).to(device)
        self.order: Tensor | None = None if self._whole is None else self._whole.order

    def dim(self) -> int:
        """2."""
        return len(self.shape)

    @property
    def whole(self) -> QTensor:
        """The whole weight."""
        return self._archive.quantized(self._record.name).to(self._device) if self._whole is None else self._whole

    def narrow(self, dim: int, start: int, length: int) -> QTensor:
        """As `QTensor.narrow`, reading no other values than those of the part; validates them."""
        if self._whole is not None:
            return self._whole.narrow(dim, start, length)
        rows = dim in (0, -2)
        if not rows:
            _check_columns(self.format, start, start + length, self.shape[1])
        described = parts(self.format, *self.shape)
        found = {part.name: self._read(part, start, start + length, rows=rows) for part in described}
        shape = (length, self.shape[1]) if rows else (self.shape[0], length)
        record = replace(self._record, shape=shape)
        path = self._archive.shards[self._record.tensor_names[0]]
        return build_weight(record, found, path).to(self._device)

    def _read(self, part: Part, start: int, stop: int, *, rows: bool) -> Tensor:
        """Read the entries of one tensor that belong to output or input features ``start .. stop``."""
        name = f"{self._record.name}.{part.name}"
        entry, path = self._archive.entries[name], self._archive.shards[name]
        along = part.n_dim if rows else part.k_dim
        unit = 1 if rows else part.k_unit
        spans = [(0, size) for size in entry.shape]
        if along is not None:
            spans[along] = (start // unit, min(-(-stop // unit), entry.shape[along]))
        return _read_block(self._archive.handle(name), entry, spans, path)


def _is_sliceable(archive: Archive, record: Record) -> bool:
    plain = record.format.layout in (PLAIN, PLAIN_INT32) and len(record.shape) == 2
    return plain and archive.has_plain_bytes and not record.order


def _check_columns(fmt: Format, start: int, stop: int, k: int) -> None:
    unit = max(fmt.group_size or 1, 8 // fmt.element.container_bits if fmt.layout == PLAIN else 8)
    if start % unit or (stop % unit and stop != k):
        raise FormatError(f"cannot read columns {start}..{stop} of K={k}: parts begin and end at multiples of {unit}.")


def _read_block(file: BinaryIO, entry: Entry, spans: list[tuple[int, int]], path: Path) -> Tensor:
    """Read ``tensor[a:b, c:d]`` of a stored tensor of two dimensions; others are read whole."""
    sizes = tuple(stop - start for start, stop in spans)
    block = torch.empty(sizes, dtype=entry.dtype)
    view = as_bytes(block)
    done = 0
    for offset, count in _runs(entry, spans):
        read = _read_at(file, entry.start + offset, view[done : done + count])
        if read != count:
            raise file_error(path, "the file ends inside its bytes; it changed while it was read.", tensor=entry.name)
        done += count
    return block


def _runs(entry: Entry, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield offset and number of the bytes of a block that are next to each other."""
    if len(spans) != 2 or spans[1] == (0, entry.shape[1]):
        row = entry.nbytes // max(entry.shape[0], 1) if entry.shape else entry.nbytes
        start, stop = spans[0] if spans else (0, 1)
        yield start * row, (stop - start) * row
        return
    size = entry.dtype.itemsize
    for place in range(*spans[0]):
        yield (place * entry.shape[1] + spans[1][0]) * size, (spans[1][1] - spans[1][0]) * size


def _read_at(file: BinaryIO, offset: int, into: memoryview) -> int:
    """Read into memory from an offset, nothing ahead of it; returns the number of bytes."""
    if not hasattr(os, "preadv"):  # Windows, macOS before 11
        file.seek(offset)
        return int(file.readinto(into))  # type: ignore[attr-defined]
    done = 0
    while done < len(into):
        count = os.preadv(file.fileno(), [into[done:]], offset + done)
        if not count:
            break
        done += count
    return done
