"""Bytes of tensors, in and out of files, and whether the values of a quantized weight are what its format allows."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..errors import FormatError
from ..formats import PLAIN, PLAIN_INT32
from ..qtensor import QTensor
from .header import Entry, problem
from .records import Record


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; the caller keeps the tensor alive. Needs no numpy."""
    size = tensor.numel() * tensor.element_size()
    return (
        memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
        if size
        else memoryview(bytearray())
    )


def storable(tensor: Tensor) -> Tensor:
    """The same values, dense and contiguous on the CPU."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def read_tensor(file: BinaryIO, entry: Entry, path: Path) -> Tensor:
    """Read one tensor into memory of its own."""
    tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    try:
        file.seek(entry.start)
        count = file.readinto(as_bytes(tensor))  # type: ignore[attr-defined]
    except OSError as error:
        raise problem(path, f"cannot be read: {error.strerror or error}.", tensor=entry.name) from error
    if count != entry.nbytes:
        raise problem(path, "the file ends inside its bytes; it changed while it was read.", tensor=entry.name)
    return tensor


def build_weight(record: Record, tensors: dict[str, Tensor], path: Path) -> QTensor:
    """The quantized weight; raises `CheckpointError` for values that its format does not allow."""
    try:
        weight = QTensor(
            tensors["data"], tensors["scale"], tensors.get("zero"), record.shape, record.format, record.quantizer
        )
    except FormatError as error:
        raise problem(path, str(error).replace("\n", " "), tensor=record.name) from None
    if not _is_canonical(weight):
        raise problem(path, "padding after the last column holds codes other than zero.", tensor=record.name)
    return weight


def _is_canonical(weight: QTensor) -> bool:
    """Whether packing the codes again gives the same bytes: kernels rely on padding being code 0."""
    fmt, k = weight.format, weight.shape[1]
    padded = k % (8 if fmt.layout == PLAIN_INT32 else 2) != 0 and fmt.bits == 4
    if fmt.layout in (PLAIN, PLAIN_INT32) and not padded:
        return True
    return torch.equal(fmt.codec.encode(weight.codes()), weight.data)
