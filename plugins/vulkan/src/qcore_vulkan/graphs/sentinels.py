"""What host memory of a state holds while the device's values are newer: sentinels, so that no read of it goes unseen.

Floats get *signaling* NaN that neither torch nor a processor makes; int64 gets numbers that do not fit the 32 bits of
the device. Torch computes NaN from them, and what it has written stands out. Where a copy of them arrives at the
device, it is an error:

* Arithmetic in place changes a signaling NaN, and so does a change of sign: it is never taken for memory that torch
  has not written.
* Their free bits depend on the position and on the filling: neither are values that torch has moved within a state,
  copied from another one, or kept from an earlier time.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from qcore import PluginError

# ruff: noqa: SLF001 - torch has storages and their counts only under private names

_PERIOD = 4099
"""Sentinels after which they repeat: a prime, as distances in tensors are not multiples of it."""


class _Kind(NamedTuple):
    """The sentinels of a dtype.

    **Fields:** ``bits``: an integer dtype of the same size; ``base``: a sentinel without its ``free`` bits;
    ``marks``: masks and what they leave of every sentinel, whether torch has quieted it, changed its sign or cast it.
    """

    bits: torch.dtype
    base: int
    free: int
    marks: tuple[tuple[int, int], ...]


_KINDS = {
    torch.float32: _Kind(
        torch.int32, 0xFFA0C300 - (1 << 32), 0x000F00FF, ((0x7FB0FF00, 0x7FA0C300), (0x7FB01FFF, 0x7FA00000))
    ),
    torch.float16: _Kind(torch.int16, 0xFD00 - (1 << 16), 0x007F, ((0x7D80, 0x7D00),)),
    torch.bfloat16: _Kind(torch.int16, 0xFFA0 - (1 << 16), 0x000F, ((0x7FB0, 0x7FA0),)),
    torch.int64: _Kind(torch.int64, -0x5A3C71E29D4B0000, 0xFFFF, ((-0x10000, -0x5A3C71E29D4B0000),)),
}

DTYPES = frozenset(_KINDS)
"""Dtypes that have sentinels. An int32, a bool or an int of fewer bits may be any pattern."""


class StaleValuesError(PluginError):
    """Torch has read a state whose values were on the device, and what it made of them would be computed with."""


def _stale(tensor: Tensor, what: str) -> StaleValuesError:
    return StaleValuesError(
        f"a tensor {tensor.dtype} {tuple(tensor.shape)} of a model that qcore_vulkan has compiled {what}.\nA tensor "
        f"that the model writes, such as a KV cache, has its values on the device, and NaN in host memory until "
        f"qcore.graphs.synchronize(tensor or model): call it before torch reads, copies or reorders one. Beam search "
        f"reorders its cache: compile that as well (docs/reference/vulkan.md, KV caches), or use the default, dynamic "
        f"cache. Fill memory of torch.empty before a model reads it."
    )


_numbers = itertools.count()
_ever: list[bool] = []
"""Not empty once there was a sentinel in this process."""


class Sentinels:
    """One filling of a tensor's memory."""

    def __init__(self, tensor: Tensor) -> None:
        """Fill the memory of a contiguous tensor of `DTYPES`. Counts as a write, for copies of what shares it."""
        _ever[:] = [True]
        self._like = tensor.dtype, tensor.shape
        at = next(_numbers) % _PERIOD
        self._period = _two_periods(tensor.dtype)[at : at + _PERIOD]
        self._memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for memory, period in self._aligned(_bits(tensor.data)):
                memory.copy_(period)
        torch.autograd.graph.increment_version(tensor)

    def left(self, tensor: Tensor) -> Tensor | None:
        """Where they still stand in a tensor that torch has written to: bool, in its shape; None if nowhere.

        Raises `StaleValuesError` if torch has written sentinels, or nothing at all.
        """
        if (tensor.dtype, tensor.shape) != self._like:  # torch has replaced its memory
            return None
        bits = _bits(tensor)
        same = torch.empty(bits.shape, dtype=torch.bool, device="cpu")
        for (now, period), (out, _) in zip(self._aligned(bits), self._aligned(same), strict=True):
            torch.eq(now, period, out=out)
        count, same = np.count_nonzero(same.numpy()), same.view(tensor.shape)
        if count == tensor.numel():
            raise _stale(tensor, "was written from its own stale memory, or not changed by the write")
        check(tensor.detach().masked_fill(same, 0) if count else tensor.detach())
        return same if count else None

    def clear(self) -> None:
        """Zero the memory if nothing shares it: it is about to be freed, and torch.empty may hand it out again."""
        if self._memory.expired():  # type: ignore[no-untyped-call]
            return
        storage = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        if torch._C._storage_Use_Count(storage._cdata) <= 2:
            ctypes.memset(storage.data_ptr(), 0, storage.nbytes())  # not by torch, which may be tracing a model

    def _aligned(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Whole periods ``(n, _PERIOD)`` of a flat tensor, and the rest, each with the sentinels for it."""
        whole = flat.numel() - flat.numel() % _PERIOD
        yield flat[:whole].view(-1, _PERIOD), self._period
        yield flat[whole:], self._period[: flat.numel() - whole]


def check(tensor: Tensor) -> None:
    """Raise `StaleValuesError` if torch has made a tensor from stale memory of a state."""
    if not _ever or tensor.dtype not in DTYPES:
        return
    if tensor.is_floating_point():
        total = tensor.sum().item()
        if total == total:  # noqa: PLR0124 - no NaN among them
            return
    if _marked(tensor.dtype, _bits(tensor)).any():
        raise _stale(tensor, "was made by torch from stale memory")


def _bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers, flat: a view of a contiguous one."""
    return tensor.detach().contiguous().reshape(-1).view(_KINDS[tensor.dtype].bits)


def _marked(dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Whether each element is a sentinel of any filling."""
    found = torch.zeros(bits.shape, dtype=torch.bool, device="cpu")
    for mask, mark in _KINDS[dtype].marks:
        found |= (bits & mask) == mark
    return found


@lru_cache(maxsize=len(_KINDS))
def _two_periods(dtype: torch.dtype) -> Tensor:
    """Sentinels in their bits, so that a period may begin at any of the first."""
    kind = _KINDS[dtype]
    source = torch.Generator("cpu").manual_seed(0)
    random = torch.randint(1 << 31, (_PERIOD,), generator=source, dtype=torch.int64, device="cpu")
    return (kind.base + (random & kind.free)).to(kind.bits).repeat(2)
