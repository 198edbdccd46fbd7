"""oneDNN's matmul through its C API: the library that torch's XPU ops call, here on its CPU engine.

Constants are those of the public headers of oneDNN 3 (`dnnl_common_types.h`, `dnnl_types.h`), which it keeps stable.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_uint, c_void_p
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import xpu_peers_packages as packages
from torch import Tensor

DTYPES = {
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float32: 3,
    torch.int32: 4,
    torch.int8: 5,
    torch.uint8: 6,
    "s4": 11,
    "u4": 12,
}
FPMATH = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""strict, bf16, f16."""
SRC, WEIGHTS, DST, SCRATCHPAD = 1, 33, 17, 80
SCALES, ZERO_POINTS = 4096, 8192
_CPU = 1
_IN_ORDER = 1
_SCRATCHPAD_USER = 1
_ALLOCATE = c_void_p(-1)
_QUERY_IMPLEMENTATION, _QUERY_SCRATCHPAD = 8, 136
_STATUS = (
    "success",
    "out of memory",
    "invalid arguments",
    "unimplemented",
    "last implementation reached",
    "runtime error",
)
_NDIMS = 12
SYCL = 512

_Dims = c_int64 * _NDIMS


class _Version(ctypes.Structure):
    _fields_ = (
        ("major", c_int),
        ("minor", c_int),
        ("patch", c_int),
        ("hash", c_char_p),
        ("cpu_runtime", c_uint),
        ("gpu_runtime", c_uint),
    )


class _Argument(ctypes.Structure):
    _fields_ = (("arg", c_int), ("memory", c_void_p))


class Refused(Exception):  # noqa: N818 - an answer of the library, not always an error of ours
    """A call that oneDNN answered with another status than success."""


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "dnnl_engine_create": (POINTER(c_void_p), c_int, c_size_t),
    "dnnl_stream_create": (POINTER(c_void_p), c_void_p, c_uint),
    "dnnl_stream_wait": (c_void_p,),
    "dnnl_memory_desc_create_with_strides": (POINTER(c_void_p), c_int, _Dims, c_int, _Dims),
    "dnnl_memory_desc_destroy": (c_void_p,),
    "dnnl_memory_create": (POINTER(c_void_p), c_void_p, c_void_p, c_void_p),
    "dnnl_memory_destroy": (c_void_p,),
    "dnnl_memory_map_data": (c_void_p, POINTER(c_void_p)),
    "dnnl_memory_unmap_data": (c_void_p, c_void_p),
    "dnnl_primitive_attr_create": (POINTER(c_void_p),),
    "dnnl_primitive_attr_destroy": (c_void_p,),
    "dnnl_primitive_attr_set_scratchpad_mode": (c_void_p, c_int),
    "dnnl_primitive_attr_set_deterministic": (c_void_p, c_int),
    "dnnl_primitive_attr_set_fpmath_mode_v2": (c_void_p, c_int, c_int),
    "dnnl_primitive_attr_set_scales": (c_void_p, c_int, c_int, c_int, _Dims, c_int),
    "dnnl_primitive_attr_set_zero_points": (c_void_p, c_int, c_int, c_int, _Dims, c_int),
    "dnnl_matmul_primitive_desc_create": (POINTER(c_void_p), *[c_void_p] * 6),
    "dnnl_primitive_desc_destroy": (c_void_p,),
    "dnnl_primitive_desc_query": (c_void_p, c_int, c_int, c_void_p),
    "dnnl_primitive_create": (POINTER(c_void_p), c_void_p),
    "dnnl_primitive_destroy": (c_void_p,),
    "dnnl_primitive_execute": (c_void_p, c_void_p, c_int, POINTER(_Argument)),
}


@cache
def _library() -> ctypes.CDLL:
    found = packages.open_onednn()
    for name, arguments in _SIGNATURES.items():
        getattr(found, name).argtypes = arguments
    found.dnnl_version.restype = POINTER(_Version)
    found.dnnl_memory_desc_get_size.argtypes, found.dnnl_memory_desc_get_size.restype = (c_void_p,), c_size_t
    found.dnnl_primitive_desc_query_md.argtypes = (c_void_p, c_int, c_int)
    found.dnnl_primitive_desc_query_md.restype = c_void_p
    return found


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        said = _STATUS[status] if status < len(_STATUS) else f"status {status}"
        raise Refused(f"oneDNN: {name}: {said}")


@cache
def _engine() -> tuple[c_void_p, c_void_p]:
    """The engine on the CPU and a stream of it; they live as long as the process."""
    engine, stream = c_void_p(), c_void_p()
    _call("dnnl_engine_create", byref(engine), _CPU, 0)
    _call("dnnl_stream_create", byref(stream), engine, _IN_ORDER)
    return engine, stream


def version() -> _Version:
    """Numbers, commit and runtimes of the library."""
    return _library().dnnl_version().contents  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Matrix:
    """A matrix as oneDNN is told of it: ``data`` holds its bytes, ``dtype`` says what they mean.

    ``strides`` count elements, which for u4 and s4 are nibbles.
    """

    data: Tensor
    dims: tuple[int, int]
    strides: tuple[int, int]
    dtype: Any

    @classmethod
    def of(cls, data: Tensor) -> Matrix:
        """A tensor as it lies there."""
        return cls(data, tuple(data.shape), data.stride(), data.dtype)


@dataclass(frozen=True)
class Factor:
    """A scale or zero point of an argument: bit i of ``mask`` says that it varies along dimension i, per ``group``."""

    values: Tensor
    mask: int
    group: tuple[int, int] | None = None


@dataclass(frozen=True)
class Attributes:
    """``scales`` and ``zeros`` by argument; ``fpmath``: what integers may be converted to, None = not said."""

    scales: dict[int, Factor] = field(default_factory=dict)
    zeros: dict[int, Factor] = field(default_factory=dict)
    fpmath: torch.dtype | None = None


@dataclass(frozen=True)
class Result:
    """The product, and which of oneDNN's implementations made it."""

    y: Tensor
    implementation: str


def matmul(src: Matrix, weights: Matrix, out: torch.dtype, attributes: Attributes) -> Result:
    """``src (M, K) @ weights (K, N)``; raises `Refused` where this engine has no such primitive."""
    with ExitStack() as stack:
        y = torch.empty(src.dims[0], weights.dims[1], dtype=out)
        matrices = {SRC: src, WEIGHTS: weights, DST: Matrix.of(y)}
        described = {arg: _described(stack, matrix) for arg, matrix in matrices.items()}
        primitive = _primitive_desc(stack, described, _attributes(stack, attributes))
        memories = {arg: _filled(stack, described[arg], matrix.data) for arg, matrix in matrices.items()}
        memories |= _factors(stack, SCALES, attributes.scales) | _factors(stack, ZERO_POINTS, attributes.zeros)
        scratchpad = _library().dnnl_primitive_desc_query_md(primitive, _QUERY_SCRATCHPAD, 0)
        memories[SCRATCHPAD] = _memory(stack, c_void_p(scratchpad))
        _execute(stack, primitive, memories)
        _read(memories[DST], y)
        return Result(y, _implementation(primitive))


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether this engine has a product of floats of this dtype on this processor."""
    x = Matrix.of(torch.ones(1, 1, dtype=dtype))
    try:
        matmul(x, x, dtype, Attributes())
    except Refused:
        return False
    return True


@cache
def sums_exactly() -> bool:
    """Whether this engine's products of int8 hold sums of two products that need more than 16 bits."""
    x = Matrix.of(torch.full((8, 64), 127, dtype=torch.int8))
    w = Matrix.of(torch.full((64, 8), 127, dtype=torch.int8))
    return bool((matmul(x, w, torch.int32, Attributes()).y == 64 * 127 * 127).all())


def _described(stack: ExitStack, matrix: Matrix) -> c_void_p:
    made = c_void_p()
    dims, strides = _Dims(*matrix.dims), _Dims(*matrix.strides)
    _call("dnnl_memory_desc_create_with_strides", byref(made), len(matrix.dims), dims, DTYPES[matrix.dtype], strides)
    stack.callback(_call, "dnnl_memory_desc_destroy", made)
    return made


def _attributes(stack: ExitStack, attributes: Attributes) -> c_void_p:
    made = c_void_p()
    _call("dnnl_primitive_attr_create", byref(made))
    stack.callback(_call, "dnnl_primitive_attr_destroy", made)
    _call("dnnl_primitive_attr_set_scratchpad_mode", made, _SCRATCHPAD_USER)
    _call("dnnl_primitive_attr_set_deterministic", made, 1)
    if attributes.fpmath is not None:
        _call("dnnl_primitive_attr_set_fpmath_mode_v2", made, FPMATH[attributes.fpmath], 1)
    for name, factors in (("scales", attributes.scales), ("zero_points", attributes.zeros)):
        for arg, factor in factors.items():
            groups = _Dims(*(factor.group or ()))
            ndims, dtype = len(factor.group or ()), DTYPES[factor.values.dtype]
            _call(f"dnnl_primitive_attr_set_{name}", made, arg, factor.mask, ndims, groups, dtype)
    return made


def _primitive_desc(stack: ExitStack, described: dict[int, c_void_p], attributes: c_void_p) -> c_void_p:
    made, (engine, _) = c_void_p(), _engine()
    src, weights, dst = (described[arg] for arg in (SRC, WEIGHTS, DST))
    _call("dnnl_matmul_primitive_desc_create", byref(made), engine, src, weights, None, dst, attributes)
    stack.callback(_call, "dnnl_primitive_desc_destroy", made)
    return made


def _implementation(primitive_desc: c_void_p) -> str:
    name = c_char_p()
    _call("dnnl_primitive_desc_query", primitive_desc, _QUERY_IMPLEMENTATION, 0, byref(name))
    return (name.value or b"").decode()


def _factors(stack: ExitStack, kind: int, factors: dict[int, Factor]) -> dict[int, c_void_p]:
    found = {}
    for arg, factor in factors.items():
        values = factor.values.contiguous()
        dims, strides = tuple(values.shape), values.stride()
        described = _described(stack, Matrix(values, dims, strides, values.dtype))  # type: ignore[arg-type]
        found[kind | arg] = _filled(stack, described, values)
    return found


def _memory(stack: ExitStack, described: c_void_p) -> c_void_p:
    made, (engine, _) = c_void_p(), _engine()
    _call("dnnl_memory_create", byref(made), described, engine, _ALLOCATE)
    stack.callback(_call, "dnnl_memory_destroy", made)
    return made


def _filled(stack: ExitStack, described: c_void_p, data: Tensor) -> c_void_p:
    size, memory = _library().dnnl_memory_desc_get_size(described), _memory(stack, described)
    have = data.untyped_storage().nbytes() - data.storage_offset() * data.element_size()
    assert size <= have, f"oneDNN would read {size} bytes, the tensor holds {have}"
    mapped = c_void_p()
    _call("dnnl_memory_map_data", memory, byref(mapped))
    ctypes.memmove(mapped, data.data_ptr(), size)
    _call("dnnl_memory_unmap_data", memory, mapped)
    return memory


def _read(memory: c_void_p, y: Tensor) -> None:
    mapped = c_void_p()
    _call("dnnl_memory_map_data", memory, byref(mapped))
    ctypes.memmove(y.data_ptr(), mapped, y.numel() * y.element_size())
    _call("dnnl_memory_unmap_data", memory, mapped)


def _execute(stack: ExitStack, primitive_desc: c_void_p, memories: dict[int, c_void_p]) -> None:
    primitive, (_, stream) = c_void_p(), _engine()
    _call("dnnl_primitive_create", byref(primitive), primitive_desc)
    stack.callback(_call, "dnnl_primitive_destroy", primitive)
    arguments = (_Argument * len(memories))(*(_Argument(arg, memory.value) for arg, memory in memories.items()))
    _call("dnnl_primitive_execute", primitive, stream, len(memories), arguments)
    _call("dnnl_stream_wait", stream)
