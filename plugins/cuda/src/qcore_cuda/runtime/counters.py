"""Atomic counters with which a kernel's last program detects that it is the last: zero before the kernel and after it.

Kernels that run concurrently must not share counters. Kernels of one stream run in order, so all calls on a stream
share one set. A graph may be replayed at any time on any stream, so each captured call gets a set of its own, which is
never reused. If those run out, or a graph is captured before anything ran, counters are allocated and zeroed per call.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

_SLAB = 1 << 20
"""Counters of a device: 4 MiB."""
_STREAM = 1 << 11
"""Counters of a stream."""
_slabs: dict[int, _Slab] = {}
_streams: dict[tuple[int, int], Tensor] = {}
_lock = threading.Lock()


class _Slab:
    def __init__(self, device: torch.device) -> None:
        self._all = torch.zeros(_SLAB, dtype=torch.int32, device=device)
        self._used = 0
        torch.cuda.synchronize(device)  # other streams must read zeros, too

    def take(self, count: int) -> Tensor | None:
        """Unused counters, or None if there are too few."""
        start, end = self._used, self._used + -(-count // 32) * 32
        if end > _SLAB:
            return None
        self._used = end
        return self._all[start:end]


def counters(count: int, device: torch.device) -> Tensor:
    """At least ``count`` counters for the next kernel on the current stream."""
    found = None
    if device.type == "cuda":
        with _lock:
            found = _found(count, device)
    return torch.zeros(count, dtype=torch.int32, device=device) if found is None else found


def _found(count: int, device: torch.device) -> Tensor | None:
    index = device.index or 0
    slab = _slabs.get(index)
    if torch.cuda.is_current_stream_capturing():
        return None if slab is None else slab.take(count)
    if count > _STREAM:
        return None
    key = index, _stream(index)
    found = _streams.get(key)
    if found is None:
        if slab is None:
            slab = _slabs[index] = _Slab(device)
        found = slab.take(_STREAM)
        if found is not None:
            _streams[key] = found
    return found


_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: 0)  # noqa: SLF001 - has no public name
