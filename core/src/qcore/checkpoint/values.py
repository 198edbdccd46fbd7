"""Read and write the bytes of tensors, and validate the values of quantized weights."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..discovery.registry import Guarded
from ..errors import FormatError, QcoreWarning, dtype_name
from ..formats import PLAIN, PLAIN_INT32
from ..weights.qtensor import QTensor
from ..weights.validation import check_codes
from .header import Entry, file_error, shown
from .records import Record

_NIBBLE = 4

FLOAT_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of stored codes that torch takes for floats."""


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without numpy; the caller must keep the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    assert tensor.data_ptr(), "the tensor has no memory"
    assert not tensor.is_neg(), "the negation of the tensor is still lazy"
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def storable(tensor: Tensor) -> Tensor:
    """Return the values as a contiguous CPU tensor with lazy negation and conjugation resolved."""
    found = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return found if found.data_ptr() or not found.numel() else found.clone()  # ZeroTensors have no memory


def rounded(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A float tensor in another dtype; warns if finite numbers become Inf."""
    found = value.to(dtype)
    if found is not value and not _is_finite(found) and bool((found.isinf() & ~value.isinf()).any()):
        what = f"tensor {shown(name)!r} holds numbers that {dtype_name(dtype)} cannot represent: they become Inf."
        warnings.warn(f"{what}\nChoose another dtype.", QcoreWarning, stacklevel=2)
    return found


def _is_finite(tensor: Tensor) -> bool:
    """Whether every number is finite: one pass without temporaries, a twentieth of the time of ``isfinite().all()``."""
    return not tensor.numel() or all(bool(bound.isfinite()) for bound in tensor.aminmax())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same values, bit for bit."""
    one, other = storable(one), storable(other)
    return as_bytes(one) == as_bytes(other)


def read_tensor(file: BinaryIO, entry: Entry, path: Path) -> Tensor:
    """Read one tensor into new memory. Raises `CheckpointError` if memory is too small or the file too short."""
    try:
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    except (RuntimeError, MemoryError):
        what = f"it needs {entry.nbytes:,} bytes of memory, which this machine does not have."
        raise file_error(path, what, "Is this the right file? Use a machine with more memory.", entry.name) from None
    try:
        file.seek(entry.start)
        count = file.readinto(as_bytes(tensor))  # type: ignore[attr-defined]
    except OSError as error:
        raise file_error(path, f"cannot be read: {error.strerror or error}.", tensor=entry.name) from error
    if count != entry.nbytes:
        raise file_error(path, "the file ends inside its bytes; it changed while it was read.", tensor=entry.name)
    return tensor


def build_weight(record: Record, tensors: dict[str, Tensor], path: Path) -> QTensor:
    """Build the quantized weight; raises `CheckpointError` for values that its format does not allow."""
    with _as_file_errors(record, path):
        weight = QTensor.from_tensors(tensors, record.shape, record.format, record.quantizer)
    check_weight(weight, record, path)
    return weight


def check_weight(weight: QTensor, record: Record, path: Path) -> None:
    """Raise `CheckpointError` for codes or padding that the format of the weight does not allow."""
    with _as_file_errors(record, path):
        canonical = _is_canonical(weight)
    if not canonical:
        raise file_error(path, "padding after the last column holds codes other than zero.", tensor=record.name)


@contextmanager
def _as_file_errors(record: Record, path: Path) -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        raise file_error(path, str(error).replace("\n", " "), tensor=record.name) from None
    except Guarded as error:  # a third-party layout
        what = f"layout {record.format.layout.name!r} raised {type(error).__name__}: {error}"
        raise file_error(path, what.replace("\n", " "), tensor=record.name) from error


def _is_canonical(weight: QTensor) -> bool:
    """Whether encoding the codes again gives the same bytes: kernels require padding with code 0.

    Raises `FormatError` for codes out of range, which are possible if an element has fewer bits than its container.
    """
    fmt, k = weight.format, weight.shape[-1]
    container = fmt.element.container_bits
    padded = container == _NIBBLE and k % (8 if fmt.layout == PLAIN_INT32 else 2) != 0
    if fmt.layout in (PLAIN, PLAIN_INT32) and not padded and fmt.bits == container:
        return True
    codes = weight.codes()
    check_codes(codes, fmt)
    return torch.equal(weight.encode(codes), weight.data)
