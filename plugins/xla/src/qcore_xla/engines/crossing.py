"""How values cross between torch and a program: by memory that both see, and on a GPU in the order of their streams.

**Integers of 64 bits**, which programs compute in 32, cross as their bytes: pairs of int32 along a last dimension, the
low half first. So nothing is converted on the way, no kernel runs, and no host waits to learn whether the values fit:
the program looks itself, and notes what does not (`joined`).

**Streams.** JAX runs programs on a stream of its own, behind torch's back. `jax.dlpack.from_dlpack` lets it wait for
torch's current stream, and with it the whole program for all that torch has queued there, writes to states included
(`wait_for_torch` does the same for a call without a fresh tensor). `tensor_of` a result lets torch's stream wait for
the whole program, and with it all that torch does afterwards, reads of states included. The host waits for neither,
but does for torch's stream if arguments are copied to an `inbox`.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

_ALIGNED = 16
"""Bytes to which XLA's kernels for GPUs expect arguments to be aligned."""


def narrowed(tensor: Tensor) -> Tensor:
    """int64 as int32, in which programs compute integers. Raises `OverflowError` for values that do not fit."""
    if tensor.dtype != torch.int64:
        return tensor
    narrow = tensor.to(torch.int32)
    if not torch.equal(narrow.to(torch.int64), tensor):
        raise OverflowError("an integer does not fit the 32 bits in which qcore_xla computes integers.")
    return narrow


def array_of(tensor: Tensor) -> Array:
    """An array that shares the memory of a tensor if it can; int64 as int32, see `narrowed`."""
    return _imported(narrowed(tensor.detach().resolve_neg()))


def array_of_bytes(tensor: Tensor) -> Array:
    """The same with int64 as pairs."""
    return _imported(in_pairs(tensor))


def _imported(tensor: Tensor) -> Array:
    dense = tensor.contiguous()
    if not dense.is_cuda:
        return jax.dlpack.from_dlpack(dense)  # type: ignore[no-any-return]
    if dense.data_ptr() % _ALIGNED:
        dense = dense.clone()
    return jax.dlpack.from_dlpack(_OnGpu(dense))  # type: ignore[no-any-return]


class _OnGpu:
    """A CUDA tensor for `jax.dlpack.from_dlpack`: what `Tensor.__dlpack__` does, in a fraction of its time."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return _ROCM if torch.version.hip else _CUDA, self._tensor.device.index

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        device = self._tensor.device
        if stream in _NO_POINTERS:
            wait_for_torch(device)
        else:
            jax_stream = torch.cuda.ExternalStream(stream, device)  # type: ignore[no-untyped-call]
            jax_stream.wait_stream(torch.cuda.current_stream(device))
        return to_dlpack(self._tensor)


def tensor_of(array: Array, device: torch.device) -> Tensor:
    """The tensor of a result on the GPU ``device``, whose current stream waits for the program that computes it.

    `torch.from_dlpack` of the array itself asks the array for its device, and torch for the stream by the name of that
    device, which takes most of its time.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    pointer = stream or (0 if torch.version.hip else _DEFAULT_STREAM)
    return from_dlpack(array.__dlpack__(stream=pointer))  # type: ignore[call-arg]


_DEFAULT_STREAM = 1
"""What DLPack passes for CUDA's default stream, whose pointer is 0."""
_CUDA, _ROCM = 2, 10
"""DLPack's numbers."""
_NO_POINTERS = (None, -1, 0, 1, 2)
"""What DLPack passes in the place of a stream's pointer."""


def in_pairs(tensor: Tensor) -> Tensor:
    """int64 ``(...)`` as int32 ``(..., 2)`` that shares its memory if it is contiguous; others as they are."""
    tensor = tensor.detach().resolve_neg()
    if tensor.dtype != torch.int64:
        return tensor
    return tensor.contiguous().unsqueeze(-1).view(torch.int32)


_LOW = 0 if sys.byteorder == "little" else 1


def joined(pairs: Any) -> tuple[Array, Array]:
    """Pairs ``(..., 2)`` as int32 ``(...)``, and whether a value of 64 bits does not fit."""
    pairs = jnp.asarray(pairs)
    low, high = pairs[..., _LOW], pairs[..., 1 - _LOW]
    return low, jnp.any(high != lax.shift_right_arithmetic(low, jnp.full_like(low, 31)))


def parted(values: Array) -> Array:
    """The inverse of `joined`, for values that fit."""
    # Not by joining both, which XLA makes a kernel of for each array; selections of many arrays become one.
    pair = jnp.broadcast_to(values[..., None], (*values.shape, 2))
    high = lax.shift_right_arithmetic(pair, jnp.full_like(pair, 31))
    return jnp.where(lax.broadcasted_iota(jnp.int32, pair.shape, values.ndim) == _LOW, pair, high)


def wait_for_torch(device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
    """Let the host wait for torch's current stream on a GPU: ``stream``, if it is known already."""
    (stream or torch.cuda.current_stream(device)).synchronize()
