"""Names of NVIDIA GPUs and the driver's version, read from NVML, which creates no CUDA context and survives a fork."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

_LENGTH = 96  # NVML's own limit for names and versions


class Driver(NamedTuple):
    """Facts from NVML: a name per GPU (also of GPUs hidden from CUDA), and the driver's version."""

    names: tuple[str, ...] = ()
    version: str = ""


def driver() -> Driver:
    """Query NVML; empty if it is missing or fails."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return Driver()
    except (OSError, AttributeError):
        return Driver()
    try:
        return Driver(_names(library), _text(library.nvmlSystemGetDriverVersion))
    finally:
        library.nvmlShutdown()


def _names(library: ctypes.CDLL) -> tuple[str, ...]:
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return ()
    handles = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if not library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            handles.append(handle)
    return tuple(_text(library.nvmlDeviceGetName, handle) for handle in handles)


def _text(function: ctypes._NamedFuncPointer, *arguments: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_LENGTH)
    failed = function(*arguments, buffer, _LENGTH)
    return "" if failed else buffer.value.decode(errors="replace")
