"""Functions of single elements of strided operands: one dispatch each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..builder import Builder, Ref, fold
from .operand import HALVES, MOST_DIMS, WORDS, Operand, result
from .prepare import LANES
from .walks import NUMBER_P, NUMBER_Q, walk

UNARY = {
    "copy": 0, "neg": 1, "abs": 2, "sign": 3, "exp": 4, "exp2": 5, "expm1": 6, "log": 7, "log1p": 8, "log2": 9,
    "sqrt": 10, "rsqrt": 11, "reciprocal": 12, "sin": 13, "cos": 14, "tan": 15, "asin": 16, "acos": 17, "atan": 18,
    "sinh": 19, "cosh": 20, "tanh": 21, "sigmoid": 22, "erf": 23, "relu": 24, "gelu": 25, "gelu_tanh": 26, "silu": 27,
    "mish": 28, "hardsigmoid": 29, "hardswish": 30, "floor": 31, "ceil": 32, "round": 33, "trunc": 34,
    "leaky_relu": 35, "elu": 36, "softplus": 37, "clamp": 38, "bitwise_not": 39, "logical_not": 40, "isnan": 41,
    "isinf": 42,
}  # fmt: skip
"""Functions of an element, and their numbers in the shader.

``leaky_relu`` takes the slope p, ``elu`` the factor p, ``softplus`` beta p and the threshold q, ``clamp`` the bounds p
and q. Of int32: copy, neg, abs, sign, relu, clamp, bitwise_not, logical_not; of bool: copy and the last two.
"""

BINARY = {
    "add": 0, "sub": 1, "mul": 2, "div": 3, "maximum": 4, "minimum": 5, "pow": 6, "remainder": 7, "fmod": 8,
    "floor_divide": 9, "silu_mul": 10, "gelu_mul": 11, "gelu_tanh_mul": 12, "eq": 13, "ne": 14, "lt": 15, "le": 16,
    "gt": 17, "ge": 18, "logical_and": 19, "logical_or": 20, "logical_xor": 21, "bitwise_and": 22, "bitwise_or": 23,
    "bitwise_xor": 24,
}  # fmt: skip
"""Functions of two elements, and their numbers in the shader; ``silu_mul`` is silu(x) * y."""

_INT_UNARY = {"copy", "neg", "abs", "sign", "relu", "clamp", "bitwise_not", "logical_not"}
_FLOAT_BINARY = {"div", "silu_mul", "gelu_mul", "gelu_tanh_mul"}
_INT_BINARY = {"bitwise_and", "bitwise_or", "bitwise_xor"}
_TO_BOOL = {
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isinf",
}  # fmt: skip
_CASTS = {torch.float32: 43, torch.int32: 44, torch.bool: 45}

Number = float | int


def unary(b: Builder, name: str, x: Operand, out: Operand | None = None, p: float = 0.0, q: float = 0.0) -> Operand:
    """A function of `UNARY` of each element. ``p``, ``q``: its parameters. isnan, isinf and logical_not give bools."""
    if x.dtype != torch.float32 and name not in _INT_UNARY:
        raise ValueError(f"{name} is a function of float32, not of {x.dtype}: convert the operand first")
    y = result(b, x.shape, torch.bool if name in _TO_BOOL else x.dtype, out, x)
    _launch(b, "unary", UNARY[name], WORDS[x.dtype], y, [x], (_number(p, x.dtype), _number(q, x.dtype)))
    return y


def convert(b: Builder, x: Operand, dtype: torch.dtype, out: Operand | None = None, bad: Ref | None = None) -> Operand:
    """The elements in another dtype, or a copy. Floats are truncated to int32; as bools they are whether x != 0.

    x may also be float16 or bfloat16, but not the result.
    ``bad``: a word of memory whose bit 1 is set if a float does not fit int32. Without it, the nearest is taken.
    """
    y = result(b, x.shape, dtype, out)
    source = torch.float32 if x.dtype in HALVES else x.dtype
    as_is = source == dtype or (source, dtype) == (torch.bool, torch.int32)
    _launch(b, "unary", UNARY["copy"] if as_is else _CASTS[dtype], WORDS[source], y, [x], (0, 0), bad)
    return y


def binary(
    b: Builder,
    name: str,
    x: Operand | Number,
    y: Operand | Number,
    out: Operand | None = None,
    bad: Ref | None = None,
) -> Operand:
    """A function of `BINARY` of each pair of elements, which are broadcast; operands have the same dtype.

    ``bad``: a word of memory whose bit 1 is set if a sum, difference or product of int32 overflows.
    """
    dtype = _common(x, y)
    wrong = (name in _FLOAT_BINARY and dtype != torch.float32) or (name in _INT_BINARY and dtype == torch.float32)
    if wrong:
        raise ValueError(f"{name} is no function of {dtype}: convert the operands first")
    z = result(b, _shape(x, y), torch.bool if name in _TO_BOOL else dtype, out, x, y)
    values = (_value(x, dtype), _value(y, dtype))
    _launch(b, "binary", BINARY[name], WORDS[dtype], z, [x, y], values, bad)
    return z


def where(
    b: Builder, condition: Operand, x: Operand | Number, y: Operand | Number, out: Operand | None = None
) -> Operand:
    """Elements of x where the bool ``condition`` is true, else of y; all three are broadcast."""
    dtype = _common(x, y, default=torch.float32)
    z = result(b, _shape(condition, x, y), dtype, out)
    _launch(b, "where", 0, WORDS[dtype], z, [condition, x, y], (_value(x, dtype), _value(y, dtype)))
    return z


def checked(b: Builder, index: Operand, size: int, bad: Ref, wrap: bool) -> Operand:
    """Contiguous int32 indices into 0 ... ``size - 1``, the nearest of those for one that is out of range.

    ``bad``: a word of memory whose lowest bit is set if there is one; ``wrap``: negative indices count from the end.
    """
    if not index.is_contiguous:
        index = convert(b, index, torch.int32)
    y = result(b, index.shape, torch.int32, None)
    push = [index.numel, size, int(wrap), index.offset]
    refs = [index.ref, bad, *[None] * 5, y.ref]
    b.dispatch("checked", (LANES,), fold(-(-index.numel // LANES)), push, refs)
    return y


def fill(b: Builder, out: Operand, value: Number) -> Operand:
    """Set every element of ``out``."""
    _launch(b, "unary", UNARY["copy"], WORDS[out.dtype], out, [value], (0, _number(value, out.dtype)))
    return out


def _launch(
    b: Builder,
    variant: str,
    function: int,
    kind: int,
    out: Operand,
    operands: Sequence[Operand | Number],
    numbers: tuple[Number, Number],
    bad: Ref | None = None,
) -> None:
    """``numbers``: those of the last two operands that are numbers, or the function's parameters."""
    if out.numel == 0:
        return
    views = [x.broadcast_to(out.shape) if isinstance(x, Operand) else None for x in operands]
    none = (0,) * len(out.shape)
    most = 5 if variant == "where" else MOST_DIMS
    plan = walk(out.shape, out.strides, *(none if x is None else x.strides for x in views), most=most)
    modes = [plan.mode(0, out.offset)]
    for place, x in enumerate(views, 1):
        number = NUMBER_Q if place == len(views) else NUMBER_P
        modes.append(number if x is None else plan.mode(place, x.offset))
    offsets = [out.offset, *(0 if x is None else x.offset for x in views)]
    refs = [out.ref if x is None else x.ref for x in views]  # a shader's bindings must all be set
    half = 0 if views[0] is None else HALVES.get(views[0].dtype, 0)
    modes += [0] * (4 - len(modes))
    constants = (LANES, len(plan.sizes), plan.width, function, kind, *modes, half, int(bad is not None))
    push = [*plan.push(most), *offsets, *numbers]
    b.dispatch(
        variant,
        constants,
        fold(-(-plan.lanes // LANES)),
        push,
        [*refs, *[None] * (6 - len(refs)), bad or out.ref, out.ref],
    )


def _common(*values: Operand | Number, default: torch.dtype | None = None) -> torch.dtype:
    dtypes = {x.dtype for x in values if isinstance(x, Operand)}
    if not dtypes and default is not None:
        return default if any(isinstance(x, float) for x in values) else torch.int32
    if len(dtypes) != 1:
        raise ValueError(f"operands must have one dtype, and have {sorted(map(str, dtypes))}")
    return dtypes.pop()


def _shape(*values: Operand | Number) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(x.shape for x in values if isinstance(x, Operand))))  # type: ignore[no-untyped-call]


def _value(x: Operand | Number, dtype: torch.dtype) -> Number:
    if isinstance(x, Operand):
        return 0
    if dtype == torch.int32 and not -(2**31) <= x < 2**31:
        raise ValueError(f"{x} does not fit int32, which the operand beside it has on the device")
    return _number(x, dtype)


def _number(x: Number, dtype: torch.dtype) -> Number:
    """A number as the shader reads a word of ``dtype``."""
    if dtype == torch.float32:
        return float(x)
    if dtype == torch.bool:
        return int(bool(x))
    return int(min(max(x, -(2**31)), 2**31 - 1))
