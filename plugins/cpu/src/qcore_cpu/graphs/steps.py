"""Programs of the native library: its structs (``native/program.h``), and `Steps`, which appends and runs them."""

from __future__ import annotations

import ctypes
import enum
import weakref
from functools import lru_cache
from typing import Any

import torch

from .. import native, ops

TYPES = {**ops.FLOAT_TYPES, torch.int64: 5, torch.int32: 6, torch.bool: 7}
"""The library's numbering of the dtypes that programs compute in."""
DIMS, OPERANDS = 6, 3
MOST_BESIDE = 4
"""Linear layers on the same x that the library runs at once, at most."""
_Sizes = ctypes.c_int64 * DIMS
_I32, _I64, _F64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_double


class Operation(enum.IntEnum):
    """An operation element by element; the values are the library's."""

    (IDENTITY, ADD, SUB, MUL, DIV, MAXIMUM, MINIMUM, POW, EQ, NE, LT, LE, GT, GE, AND, OR, XOR, NOT, WHERE, CLAMP,
     NEG, ABS, RECIPROCAL, RSQRT, SQRT, EXP, LOG, SIN, COS, TANH, ERF, SIGMOID, SILU, GELU, GELU_TANH,
     RELU) = range(36)  # fmt: skip


class Place(ctypes.Structure):
    """Memory of a call: bytes from a base on; slot -1 for none."""

    _fields_ = [("slot", _I32), ("type", _I32), ("offset", _I64)]


NOWHERE = Place(-1, 0, 0)


class Operand(ctypes.Structure):
    """A tensor with strides in elements, or a number."""

    _fields_ = [("at", Place), ("strides", _Sizes), ("number", _F64), ("whole", _I64)]


class Elementwise(ctypes.Structure):
    """A contiguous result of operands that are broadcast to its sizes."""

    _fields_ = [
        ("operation", _I32), ("integers", _I32), ("dims", _I32), ("count", _I32), ("sizes", _Sizes), ("alpha", _F64),
        ("whole_alpha", _I64), ("operands", Operand * OPERANDS), ("to", Place),
    ]  # fmt: skip


class Copy(ctypes.Structure):
    """Elements of ``size`` bytes from some strides to others."""

    _fields_ = [
        ("source", Place), ("to", Place), ("dims", _I32), ("size", _I32), ("sizes", _Sizes),
        ("source_strides", _Sizes), ("to_strides", _Sizes),
    ]  # fmt: skip


class Norm(ctypes.Structure):
    """An rms norm, or if ``centred`` a layer norm, of contiguous rows."""

    _fields_ = [
        ("x", Place), ("weight", Place), ("bias", Place), ("y", Place), ("rows", _I64), ("n", _I64), ("eps", _F64),
        ("centred", _I32),
    ]  # fmt: skip


class Rope(ctypes.Structure):
    """A rotary embedding of rows whose numbers are contiguous."""

    _fields_ = [
        ("x", Place), ("cos", Place), ("sin", Place), ("y", Place), ("sizes", _I64 * 3), ("width", _I64),
        ("x_strides", _I64 * 3), ("cos_strides", _I64 * 3), ("sin_strides", _I64 * 3),
    ]  # fmt: skip


class Attention(ctypes.Structure):
    """Attention of few rows over many positions."""

    _fields_ = [
        ("q", Place), ("k", Place), ("v", Place), ("mask", Place), ("y", Place), ("batch", _I64), ("heads", _I64),
        ("kv_heads", _I64), ("rows", _I64), ("positions", _I64), ("width", _I64), ("v_width", _I64),
        ("q_strides", _I64 * 3), ("k_strides", _I64 * 3), ("v_strides", _I64 * 3), ("mask_strides", _I64 * 4),
        ("scale", _F64), ("causal", _I32),
    ]  # fmt: skip


class IndexCopy(ctypes.Structure):
    """Slices of ``inner`` bytes to the places that an index gives, in x itself."""

    _fields_ = [
        ("x", Place), ("index", Place), ("source", Place), ("outer", _I64), ("size", _I64), ("count", _I64),
        ("inner", _I64),
    ]  # fmt: skip


class Linear(ctypes.Structure):
    """A quantized linear layer; ``size``: bytes of the codes."""

    _fields_ = [
        ("x", Place), ("codes", Place), ("scale", Place), ("zero", Place), ("sums", Place), ("table", Place),
        ("factor", Place), ("bias", Place), ("y", Place), ("rows", _I64), ("size", _I64),
    ]  # fmt: skip


class Embedding(ctypes.Structure):
    """Rows of a quantized table ``(v, k)``."""

    _fields_ = [
        ("indices", Place), ("codes", Place), ("scale", Place), ("zero", Place), ("table", Place), ("factor", Place),
        ("y", Place), ("count", _I64), ("v", _I64), ("k", _I64), ("group", _I64), ("row_bytes", _I64),
        ("element", _I32), ("float_zeros", _I32), ("divides", _I32),
    ]  # fmt: skip


_NAMES: dict[type[ctypes.Structure], str] = {
    Elementwise: "elementwise", Copy: "copy", Norm: "norm", Rope: "rope", Attention: "attention",
    IndexCopy: "index_copy", Linear: "linear", Embedding: "embedding",
}  # fmt: skip
_NO_MEMORY = "qcore_cpu: memory ran out in a program"
_OUT_OF_RANGE = 2
"""What a run returns for an index out of range; 1 is memory that ran out."""


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    handle = native.handle()
    handle.qcore_cpu_program.restype = ctypes.c_void_p
    handle.qcore_cpu_program_free.argtypes = [ctypes.c_void_p]
    handle.qcore_cpu_program_free.restype = None
    for name in _NAMES.values():
        form = [ctypes.c_char_p] if name == "linear" else []
        getattr(handle, f"qcore_cpu_step_{name}").argtypes = [ctypes.c_void_p, ctypes.c_void_p, *form]
    handle.qcore_cpu_program_run.argtypes = [ctypes.c_void_p, _I64, _I64, ctypes.c_void_p]
    return handle


class Steps:
    """A program of the library."""

    def __init__(self) -> None:
        library = _library()
        self._program = library.qcore_cpu_program()
        if not self._program:
            raise MemoryError(_NO_MEMORY)
        weakref.finalize(self, library.qcore_cpu_program_free, self._program)
        self._run = library.qcore_cpu_program_run
        self.count = 0

    def append(self, step: ctypes.Structure, form: Any = None) -> None:
        """Append a step, which is copied; ``form``: of a quantized linear layer. Raises `MemoryError`."""
        add = getattr(_library(), f"qcore_cpu_step_{_NAMES[type(step)]}")
        if add(self._program, ctypes.addressof(step), *([] if form is None else [form])):
            raise MemoryError(_NO_MEMORY)
        self.count += 1

    def run(self, first: int, last: int, bases: Any) -> None:
        """Run steps ``first`` to ``last`` - 1. Raises `MemoryError`, or `IndexError` for an index out of range."""
        if failed := self._run(self._program, first, last, bases):
            raise IndexError("an index is out of range") if failed == _OUT_OF_RANGE else MemoryError(_NO_MEMORY)
