"""Memory that small arguments are written to, call after call: XLA takes 10 us longer to read new memory.

A call waits for its result, so the memory is free again when it returns. Each thread has its own.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LARGEST, _MOST = 1 << 18, 128
"""Bytes of an argument that is kept, and how many are: larger ones cost more to fill than to allocate."""


class Scratch(threading.local):
    """Arrays by shape, dtype and the part of them that is written; the rest is 0."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[np.ndarray[Any, Any], Tensor]] = {}

    def filled(self, x: Tensor, rows: int, columns: int) -> np.ndarray[Any, Any]:
        """``x (..., M, K)`` on the CPU with zeros up to ``(..., rows, columns)``: int8, or float32 for any other dtype.

        Valid until the next call with an x of the same shape.
        """
        key = (x.shape, rows, columns, x.dtype is torch.int8)
        found = self._known.get(key)
        if found is None:
            found = self._made(x, rows, columns, key)
        found[1].copy_(x.detach())
        return found[0]

    def _made(self, x: Tensor, rows: int, columns: int, key: Any) -> tuple[np.ndarray[Any, Any], Tensor]:
        array = np.zeros((*x.shape[:-2], rows, columns), np.int8 if x.dtype is torch.int8 else np.float32)
        made = array, torch.from_numpy(array)[..., : x.shape[-2], : x.shape[-1]]
        if array.nbytes <= _LARGEST:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = made
        return made


SCRATCH = Scratch()
