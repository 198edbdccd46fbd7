"""Arguments of the pure functions: what is wrong with them, and what is needed.

The bodies pad and crop biases and lists of experts, so one of a wrong size would give wrong results, not an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import Array

from qcore import FormatError

from .weights import PackedWeight

Geometry = tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]
"""Kernel, stride, padding and dilation, (vertical, horizontal) each."""
_FLOATS = {jnp.dtype(name): getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


def kind(weight: PackedWeight, *kinds: str) -> None:
    """Raises `TypeError` or `FormatError` unless this is one weight, packed for one of the kinds of ops."""
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"weight is a {type(weight).__name__}; load gives a qcore_xla.PackedWeight for quantized weights."
        )
    layer = weight.layer
    if layer.kind not in kinds:
        raise FormatError(
            f"a weight packed for {layer.kind} cannot be used here, where {' or '.join(kinds)} is needed: "
            f"see the arguments tables and groups of qcore_xla.load, table and groups of qcore_xla.pack."
        )
    alone, given = 2 + (layer.heads > 1) + (layer.experts > 0) + (layer.cut is not None), weight.arrays["scale"].shape
    if len(given) != alone:
        raise FormatError(
            f"scales of a weight of shape {weight.shape} have {alone} dimensions, these have the shape {given}: take "
            f"stacked weights one by one with jax.vmap or jax.lax.scan, and `part` once, inside jax.shard_map."
        )


def columns(x: Array, weight: PackedWeight) -> None:
    """Raises `FormatError` if the last dimension of x is not K."""
    if not x.ndim or x.shape[-1] != weight.layer.k:
        raise FormatError(
            f"x has shape {tuple(x.shape)}; a weight of shape {weight.shape} needs (..., {weight.layer.k})."
        )


def float_dtype(x: Array) -> Any:
    """The dtype of x. Raises `FormatError` if it is none of those of the functions."""
    dtype = jnp.dtype(x.dtype)
    if dtype not in _FLOATS:
        raise FormatError(f"x is {dtype}; it must be float32, bfloat16 or float16.")
    return dtype


def torch_dtype(dtype: Any) -> torch.dtype:
    """Torch's name of a dtype. Raises `FormatError` if it is none of those of the functions."""
    try:
        found: torch.dtype | None = _FLOATS.get(jnp.dtype(dtype))
    except TypeError:  # of no dtype at all, such as one of torch's
        found = None
    if found is None:
        raise FormatError(f"dtype is {dtype}; it must be float32, bfloat16 or float16 of jax.numpy.")
    return found


def bias(given: Any, weight: PackedWeight) -> Array | None:
    """A bias as an array of N, or of ``(E, N)`` for experts. Raises `FormatError` for another shape."""
    if given is None:
        return None
    made = jnp.asarray(given)
    needed = weight.shape[:-1]
    if made.shape != needed:
        raise FormatError(f"bias has shape {made.shape}; a weight of shape {weight.shape} needs {needed}.")
    return made


def offsets(x: Array, given: Array, weight: PackedWeight) -> None:
    """Raises `FormatError` unless x is ``(T, K)`` and there is one integer for each expert."""
    experts, k = weight.layer.experts, weight.layer.k
    if x.ndim != 2:
        raise FormatError(f"x has shape {x.shape}; experts need rows (T, {k}), sorted by expert.")
    if given.shape != (experts,) or not jnp.issubdtype(given.dtype, jnp.integer):
        raise FormatError(
            f"offsets are {given.dtype} of shape {given.shape}; {experts} experts need integers ({experts},): "
            f"the end of each expert's rows."
        )


def row_numbers(indices: Array, weight: PackedWeight) -> Array:
    """Indices within the table, int32: negative ones count from the end, as in JAX, those out of range are clipped.

    Raises `FormatError` for indices that are no integers.
    """
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise FormatError(f"indices are {indices.dtype}; they must be integers.")
    count = weight.layer.n
    wide = indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices  # the count might not fit
    if jnp.issubdtype(wide.dtype, jnp.unsignedinteger):
        return jnp.minimum(wide, count - 1).astype(jnp.int32)
    near = jnp.clip(wide, -count, count - 1).astype(jnp.int32)
    return jnp.where(near < 0, near + count, near)


def geometry(x: Array, weight: PackedWeight, *given: int | Sequence[int]) -> Geometry:
    """Kernel, stride, padding and dilation as pairs. Raises `FormatError` if they do not fit x and the weight."""
    kernel, stride, padding, dilation = (_pair(one) for one in given)
    if min(*kernel, *stride, *dilation) < 1 or min(padding) < 0:
        raise FormatError(
            f"kernel_size {kernel}, stride {stride} and dilation {dilation} must be positive, "
            f"padding {padding} 0 or more."
        )
    _image(x, weight, kernel)
    for i, axis in enumerate(("high", "wide")):
        span, there = (kernel[i] - 1) * dilation[i] + 1, x.shape[2 + i] + 2 * padding[i]
        if there < span:
            raise FormatError(f"x is {there} {axis} with its padding; the kernel {kernel} spans {span} there.")
    return kernel, stride, padding, dilation


def _pair(given: int | Sequence[int]) -> tuple[int, int]:
    first, second = given if isinstance(given, Sequence) else (given, given)
    return int(first), int(second)


def _image(x: Array, weight: PackedWeight, kernel: tuple[int, int]) -> None:
    heads, size = weight.layer.heads, kernel[0] * kernel[1]
    needed = weight.layer.k * heads
    if x.ndim != 4 or size * x.shape[1] != needed:
        raise FormatError(
            f"x has shape {x.shape} and the kernel {kernel}; a weight of shape {weight.shape} in "
            f"{heads} groups needs x (B, IC, H, W) with KH * KW * IC = {needed}."
        )
