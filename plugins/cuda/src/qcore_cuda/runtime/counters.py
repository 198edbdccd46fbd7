"""Atomic counters with which a kernel's last program detects that it is the last: zero before the kernel and after it.

Kernels that run concurrently must not share counters. Kernels of one stream run in order, so all calls on a stream
share one set; so do those of a stream while one graph is captured, which run in order whenever the graph does. Two
graphs may be replayed at the same time, so each gets a set of its own, which is never reused. If those run out, or a
graph is captured before anything ran, counters are allocated and zeroed per call, which takes a graph 1 to 2
microseconds.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_SLAB = 1 << 20
"""Counters allocated at a time: 4 MiB."""
_STREAM = 1 << 11
"""Counters of a stream, also of one that is captured."""
_CAPTURES = 64
"""Captures whose counters are remembered; there are rarely two at a time."""
_slabs: dict[int, _Slab] = {}
_spent: list[_Slab] = []
"""Kept: graphs have the addresses of their counters."""
_streams: dict[tuple[int, int], Tensor] = {}
_captured: dict[tuple[int, int, int], Tensor] = {}
"""By device, stream and capture."""
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

    @property
    def low(self) -> bool:
        """Whether it is time to have another one: while a graph is captured there is none to be had."""
        return self._used > _SLAB * 3 // 4


def counters(count: int, device: torch.device) -> Tensor:
    """At least ``count`` counters for the next kernel on the current stream."""
    found = None
    if device.type == "cuda":
        with _lock:
            found = _found(count, device)
    return torch.zeros(count, dtype=torch.int32, device=device) if found is None else found


def _found(count: int, device: torch.device) -> Tensor | None:
    index = device.index or 0
    if torch.cuda.is_current_stream_capturing():
        slab = _slabs.get(index)
        return None if slab is None else _of_capture(slab, count, index)
    if count > _STREAM:
        return None
    slab = _slabs.get(index)
    if slab is None or slab.low:
        _spent.extend([slab] if slab else [])
        slab = _slabs[index] = _Slab(device)
    key = index, _stream(index)
    if key not in _streams:
        taken = slab.take(_STREAM)
        assert taken is not None, "a new slab has room for a stream"
        _streams[key] = taken
    return _streams[key]


def _of_capture(slab: _Slab, count: int, index: int) -> Tensor | None:
    """Counters of the capture in progress on the current stream; of this call alone if captures can't be told apart."""
    stream = _stream(index)
    capture = _capture(stream)
    if capture is None or count > _STREAM:
        return slab.take(count)
    key = index, stream, capture
    if key not in _captured:
        taken = slab.take(_STREAM)
        if taken is None:
            return None
        while len(_captured) >= _CAPTURES:
            del _captured[next(iter(_captured))]
        _captured[key] = taken
    return _captured[key]


def _capture(stream: int) -> int | None:
    """The number of the capture in progress on a stream, which no other has; None if the driver does not tell."""
    query = _query()
    if query is None:
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    failed = query(stream, status, number)
    return None if failed or status.value != _ACTIVE else number.value


_ACTIVE = 1
"""The driver's status of a stream that is captured."""


@lru_cache(maxsize=1)
def _query() -> Callable[[int, Any, Any], int] | None:
    """The driver's function that tells status and number of a stream's capture, or None."""
    hip = torch.version.hip is not None
    try:
        library = ctypes.CDLL("libamdhip64.so" if hip else "libcuda.so.1")
        function = library.hipStreamGetCaptureInfo if hip else library.cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    more = () if hip else (None, None, None)  # graph and dependencies, which nobody here wants

    def query(stream: int, status: Any, number: Any) -> int:
        found = function(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), *more)
        return int(found)

    return query


_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: 0)  # noqa: SLF001 - has no public name
