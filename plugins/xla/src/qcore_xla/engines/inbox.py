"""Places of their own on a GPU for the small arguments that come anew with each call: token ids, masks, rows of x.

An import by DLPack takes the host some 100 to 300 us for a tensor (H100 and H200, jax 0.11.2: JAX waits for torch's
stream in a thread of its own), a copy to a place that JAX knows already a few. And a place that stays is what XLA's
CUDA graphs want: a graph is updated wherever an address has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .crossing import array_of_bytes, wait_for_torch

LARGEST = 1 << 20
"""Bytes of a tensor above which a copy is not small."""


class Inbox:
    """The places for the arguments of one program, whose shapes and dtypes never change."""

    def __init__(self) -> None:
        self._places: list[Tensor] = []
        self._arrays: list[Any] = []
        self._stream: torch.cuda.Stream | None = None  # of the last call

    def arrays(self, tensors: Sequence[Tensor]) -> list[Any] | None:
        """Arrays with the values of ``tensors``, int64 as pairs; None if one of them is large.

        The same arrays each time: torch's stream has waited for the program that read them last, whose results it got.
        The host waits for torch's current stream, and so for all that torch has written so far.
        """
        device, stream = tensors[0].device, None
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
                for place in self._places:
                    place.record_stream(stream)
            self._stream = stream
        if not self._arrays:
            if any(tensor.nbytes > LARGEST for tensor in tensors):
                return None
            with torch.inference_mode(False):  # later calls may write to them outside of it
                self._places = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in tensors]
            self._arrays = [array_of_bytes(place) for place in self._places]
        torch._foreach_copy_(self._places, [tensor.detach() for tensor in tensors])
        wait_for_torch(device, stream)
        return self._arrays


class Inboxes:
    """The inboxes of calls of one layer at a time, by the shapes and dtypes of their arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, Inbox] = {}

    def arrays(self, tensors: Sequence[Tensor]) -> list[Any] | None:
        """As `Inbox.arrays`; also None for int64, which layers take as it is.

        The caller holds a lock until torch's stream waits for the result.
        """
        key = tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors])
        found = self._known.pop(key, None)
        if found is None:
            if any(tensor.nbytes > _OF_A_LAYER or tensor.dtype == torch.int64 for tensor in tensors):
                return None
            while len(self._known) >= _MOST:
                del self._known[next(iter(self._known))]
            found = Inbox()
        self._known[key] = found  # as the last one: the first are those that were not used for longest
        return found.arrays(tensors)


_MOST = 64
_OF_A_LAYER = 1 << 18
"""Bytes of a tensor above which the import costs little beside the product."""
