"""Vulkan devices: the list of them, and memory and shaders on an open one."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from ctypes import byref, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from . import native
from .description import Description, parse, select
from .native import DeviceLost, NoDevice, Unsupported

Array = torch.Tensor | NDArray[Any]

VARIABLE = "QCORE_VULKAN_DEVICE"
"""Names the device: its index, or a part of its name."""
_VALIDATE = "QCORE_VULKAN_VALIDATE"

_chosen: ContextVar[int | str | None] = ContextVar("qcore_vulkan_device", default=None)
_open: dict[int, Device] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - another thread may have held it at the fork
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Stats(NamedTuple):
    """Counts of `qv_stats`; `messages`: of the validation layer."""

    buffers: int
    bytes: int
    pooled: int
    programs: int
    pipelines: int
    submissions: int
    messages: int


@lru_cache(maxsize=1)
def devices() -> Sequence[Description]:
    """The physical devices, usable or not, in the loader's order. Raises `NoDevice` if there is no driver."""
    return tuple(parse(json.loads(native.library().devices())))


def preferred() -> Description:
    """The device that QCORE_VULKAN_DEVICE names, else the best. Raises `NoDevice`."""
    wanted = os.environ.get(VARIABLE) or None
    try:
        return select(devices(), wanted)
    except NoDevice as error:
        if wanted is None:
            raise
        text = f"{error}.\n{VARIABLE}={wanted} requests it; unset the variable to use the best device."
        raise NoDevice(text) from None


@contextlib.contextmanager
def on_device(which: int | str) -> Iterator[Description]:
    """In this context, weights are packed onto this device, given by its index or a part of its name."""
    description = select(devices(), which)
    token = _chosen.set(description.index)
    try:
        yield description
    finally:
        _chosen.reset(token)


def get(which: int | str | None = None) -> Device:
    """An open device: by index or part of its name, else that of `on_device` or QCORE_VULKAN_DEVICE, else the best."""
    if which is None:
        which = _chosen.get()
    found = _open.get(which) if isinstance(which, int) else None
    if found is not None:
        return found
    description = preferred() if which is None else select(devices(), which)
    with _lock:
        found = _open.get(description.index)
        if found is None:
            found = _open[description.index] = Device(description)
        return found


def empty_cache() -> None:
    """Free the memory of open devices, except for weights: staging memory for activations, and scratch memory.

    Later calls allocate what they need again. Memory that no call has used for 10 seconds is freed at the next call.
    """
    for device in list(_open.values()):
        device.trim()


class Device:
    """An open device. Everything on it may be used from any thread; calls are serialized."""

    def __init__(self, description: Description, flags: int = 0, cache: Path | None = None):
        """``flags``: of `native`; ``cache``: the folder of pipeline caches, by default under qcore's own."""
        self.description = description
        self.profile = "cpu" if description.type == "cpu" else "gpu"
        self.lost = False
        self._process = os.getpid()
        self.library = native.library()
        if os.environ.get(_VALIDATE) == "1":
            flags |= native.VALIDATE
        handle = c_void_p()
        folder = os.fsencode(cache or _cache_folder())
        self.library.check(self.library.qv_open(description.index, folder, flags, byref(handle)))
        self.handle = handle
        self._pipelines: dict[tuple[str, tuple[int, ...], int], int | Unsupported] = {}
        self._compiling = threading.Lock()
        self._close = weakref.finalize(self, self.library.qv_close, handle)  # at exit too: saves the pipeline cache

    def __repr__(self) -> str:
        return f"<Vulkan device {self.description.index}: {self.description.name}{', lost' if self.lost else ''}>"

    def check(self, code: int) -> None:
        """Raise the exception for an error code; the next `get` reopens a device that was lost."""
        if code:
            try:
                self.library.check(code)
            except DeviceLost:
                self._forget()
                raise

    def check_process(self) -> None:
        """Raise `Forked` in a process that inherited the device, before taking a lock that was held at the fork."""
        if os.getpid() != self._process:
            self.check(self.library.qv_stats(self.handle, None, 0))

    def _forget(self) -> None:
        self.lost = True
        with _lock:
            if _open.get(self.description.index) is self:
                del _open[self.description.index]

    def close(self) -> None:
        """Free everything on the device; later uses of it raise errors."""
        self._forget()
        self._close()

    def alloc(self, nbytes: int) -> Buffer:
        """Allocate zeros on the device."""
        return Buffer(self, nbytes, 0)

    def upload(self, values: Array) -> Buffer:
        """A copy of an array on the device, dense, in the array's order of elements."""
        values = values.contiguous() if isinstance(values, torch.Tensor) else np.ascontiguousarray(values)
        buffer = Buffer(self, values.nbytes, native.UNWRITTEN)
        buffer.write(values)
        return buffer

    def pipeline(self, variant: str, constants: Sequence[int] = (), subgroup: int = 0) -> int:
        """A variant of a shader with specialization constants 0.. set, compiled once; raises `Unsupported`.

        ``subgroup``: the size that subgroups must have, 0 for any.
        """
        key = (variant, tuple(constants), subgroup)
        found = self._pipelines.get(key)
        if found is None:
            self.check_process()
            with self._compiling:
                found = self._pipelines.get(key)
                if found is None:
                    found = self._pipelines[key] = self._compile(key)
        if isinstance(found, Unsupported):
            raise found.with_traceback(None)
        return found

    def _compile(self, key: tuple[str, tuple[int, ...], int]) -> int | Unsupported:
        variant, constants, subgroup = key
        try:
            return self.compile(native.spirv(variant), constants, subgroup)
        except Unsupported as error:
            return Unsupported(f"{variant}: {error}")

    def compile(self, module: bytes, constants: Sequence[int] = (), subgroup: int = 0) -> int:
        """A pipeline of a SPIR-V module; `pipeline` does this for the package's own modules."""
        values = (c_uint32 * len(constants))(*(value & 0xFFFFFFFF for value in constants))
        number = c_uint32()
        self.check(
            self.library.qv_pipeline(self.handle, module, len(module), values, len(values), subgroup, byref(number))
        )
        return number.value

    def trim(self) -> None:
        """Free the memory that calls share; the next call allocates what it needs."""
        self.check(self.library.qv_trim(self.handle))

    def inject(self, what: int) -> None:
        """For tests: a fault for the next submission (`native.INJECT_LOST`) or allocation."""
        self.check(self.library.qv_inject(self.handle, what))

    def stats(self) -> Stats:
        """Counts of the objects alive on the device."""
        values = (c_uint64 * len(Stats._fields))()
        self.check(self.library.qv_stats(self.handle, values, len(values)))
        return Stats(*values)


class Buffer:
    """Memory on a device, freed when this object dies."""

    def __init__(self, device: Device, nbytes: int, flags: int):
        self.device = device
        self.nbytes = nbytes
        number = c_uint64()
        self._free = device.library.qv_free
        device.check(device.library.qv_alloc(device.handle, nbytes, flags, byref(number)))
        self.number = number.value

    def __del__(self) -> None:
        if hasattr(self, "number"):
            self._free(self.device.handle, self.number)  # of a device that is lost, closed or inherited: does nothing

    def write(self, values: Array, offset: int = 0) -> None:
        """Write a dense array at ``offset`` bytes."""
        address, nbytes = dense(values)
        self.device.check(self.device.library.qv_write(self.device.handle, self.number, offset, address, nbytes))

    def read(self, offset: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """Bytes of the buffer, by default all."""
        values = np.empty(self.nbytes - offset if nbytes is None else nbytes, np.uint8)
        address, size = dense(values)
        self.device.check(self.device.library.qv_read(self.device.handle, self.number, offset, address, size))
        return values


def dense(values: Array) -> tuple[int, int]:
    """Address and bytes of a contiguous array in host memory."""
    if isinstance(values, torch.Tensor):
        if not (values.is_cpu and values.is_contiguous()):
            raise ValueError("a Vulkan device needs contiguous tensors in host memory")
        return values.data_ptr(), values.nbytes
    if not values.flags.c_contiguous:
        raise ValueError("a Vulkan device needs contiguous arrays")
    return values.ctypes.data, values.nbytes


def _cache_folder() -> Path:
    """The folder of pipeline caches; created if needed."""
    named = os.environ.get("QCORE_CACHE_DIR")
    if named:
        root = Path(named).expanduser()
    else:
        import platformdirs

        root = Path(platformdirs.user_cache_dir("qcore"))
    folder = root / "vulkan"
    with contextlib.suppress(OSError):  # then nothing is cached
        folder.mkdir(parents=True, exist_ok=True)
    return folder
