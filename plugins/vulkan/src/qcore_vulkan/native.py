"""The native library through ctypes: `native/qcore_vulkan.h` in Python. Importing this loads nothing."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

from qcore.plugin_api import PluginError

ABI = 4
FILE = "libqcore_vulkan.so"

VALIDATE, BLOCK, SPIN = 1, 2, 4
"""Flags of `qv_open`: with the validation layer; how to wait for the device (default: by its type)."""
NONE, ARENA, INPUT, OUTPUT = 0, 1, 2, 3
"""Numbers of buffers: none, and those that the programs of a device share."""
DISPATCH, COPY, FILL = 0, 1, 2
"""Kinds of steps."""
NO_BARRIER = 1
TIMESTAMPS, STEP_TIMES = 1, 2
UNWRITTEN = 1
INJECT_LOST, INJECT_OUT_OF_MEMORY, INJECT_IDLE = 1, 2, 4
PUSH_WORDS, BINDINGS = 32, 12


class VulkanError(PluginError):
    """A call of the native library failed."""


class NoDevice(VulkanError):  # noqa: N818 - names a state
    """Nothing to compute on. The text begins with the reason: not built, no loader, no driver or no device."""


class OutOfMemory(VulkanError):  # noqa: N818
    """The device is out of memory; nothing was allocated."""


class DeviceLost(VulkanError):  # noqa: N818
    """The driver lost the device, with all data in its memory. The next `device.get` reopens it."""


class Forked(VulkanError):  # noqa: N818
    """This process inherited the device from the one that forked it, and cannot use it."""


class Unsupported(VulkanError):  # noqa: N818
    """The device, its compiler or this build lacks what a variant of a shader needs."""


_ERRORS: dict[int, type[VulkanError]] = {
    -2: NoDevice,
    -3: OutOfMemory,
    -4: DeviceLost,
    -5: Forked,
    -7: Unsupported,
}


class Range(ctypes.Structure):
    """`qv_range`: bytes of a buffer."""

    _fields_ = (("buffer", c_uint64), ("offset", c_uint64), ("bytes", c_uint64))


class Step(ctypes.Structure):
    """`qv_step`: a dispatch, copy or fill."""

    _fields_ = (
        ("kind", c_uint32),
        ("pipeline", c_uint32),
        ("groups", c_uint32 * 3),
        ("flags", c_uint32),
        ("push_bytes", c_uint32),
        ("bindings", c_uint32),
        ("push", c_uint32 * PUSH_WORDS),
        ("ranges", Range * BINDINGS),
    )


class Copy(ctypes.Structure):
    """`qv_copy`: rows of host memory and the rows of INPUT or OUTPUT that they are copied to or from."""

    _fields_ = (
        ("host", c_void_p),
        ("offset", c_uint64),
        ("rows", c_uint64),
        ("row_bytes", c_uint64),
        ("host_pitch", c_uint64),
        ("pitch", c_uint64),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "qv_devices": (c_char_p, c_uint64, POINTER(c_uint64)),
    "qv_open": (c_uint32, c_char_p, c_uint32, POINTER(c_void_p)),
    "qv_close": (c_void_p,),
    "qv_alloc": (c_void_p, c_uint64, c_uint32, POINTER(c_uint64)),
    "qv_free": (c_void_p, c_uint64),
    "qv_write": (c_void_p, c_uint64, c_uint64, c_void_p, c_uint64),
    "qv_read": (c_void_p, c_uint64, c_uint64, c_void_p, c_uint64),
    "qv_pipeline": (c_void_p, c_char_p, c_uint64, POINTER(c_uint32), c_uint32, c_uint32, POINTER(c_uint32)),
    "qv_program": (
        c_void_p, POINTER(Step), c_uint32, c_uint64, c_uint64, c_uint64, c_uint32, POINTER(c_void_p),
    ),
    "qv_run": (c_void_p, POINTER(Copy), c_uint32, POINTER(Copy), c_uint32, POINTER(c_double)),
    "qv_times": (c_void_p, POINTER(c_double), c_uint32),
    "qv_program_free": (c_void_p,),
    "qv_stats": (c_void_p, POINTER(c_uint64), c_uint32),
    "qv_trim": (c_void_p,),
    "qv_inject": (c_void_p, c_uint32),
}  # fmt: skip


def folders() -> list[Path]:
    """The package's folders: in an editable install, sources and build outputs are in different places."""
    return [Path(folder) for folder in sys.modules[__package__ or ""].__path__]


def built(name: str) -> Path | None:
    """A build output, by its path inside the package."""
    return next((folder / name for folder in folders() if (folder / name).is_file()), None)


class Library:
    """The functions of the native library: each returns an error code, which `check` turns into an exception."""

    def __init__(self, path: Path):
        handle = ctypes.CDLL(str(path))  # releases the GIL during calls
        handle.qv_abi.restype = c_uint32
        if handle.qv_abi() != ABI:
            raise NoDevice(f"not built: {path} belongs to a different version; reinstall qcore-vulkan")
        for name, arguments in _SIGNATURES.items():
            function = getattr(handle, name)
            function.argtypes = arguments
            function.restype = c_int
            setattr(self, name, function)
        self._message: Callable[[], bytes] = handle.qv_message
        handle.qv_message.restype = c_char_p

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(name)  # here for type checkers: the functions are set by __init__

    def check(self, code: int) -> None:
        """Raise the exception for an error code."""
        if code:
            raise _ERRORS.get(code, VulkanError)(self._message().decode(errors="replace"))

    def devices(self) -> str:
        """The physical devices as JSON."""
        needed = c_uint64()
        self.check(self.qv_devices(None, 0, byref(needed)))
        text = ctypes.create_string_buffer(needed.value)
        self.check(self.qv_devices(text, needed.value, byref(needed)))
        return text.value.decode(errors="replace")


@lru_cache(maxsize=1)
def library() -> Library:
    """The native library, loaded at the first call."""
    path = built(FILE)
    if path is None:
        raise NoDevice(
            f"not built: this installation of qcore-vulkan has no {FILE}. Install it from a wheel, or build it: "
            f"pip install plugins/vulkan"
        )
    try:
        return Library(path)
    except OSError as error:
        raise NoDevice(f"not built: {path} cannot be loaded: {error}") from error


@lru_cache(maxsize=256)
def spirv(variant: str) -> bytes:
    """The SPIR-V module of a variant of `shaders/variants.txt`."""
    path = built(f"spirv/{variant}.spv")
    if path is None:
        why = left_out(variant)
        unknown = f": the glslc that built it does not support {why}" if why else ""
        raise Unsupported(f"the shader {variant!r} is not in this build{unknown}")
    return path.read_bytes()


def left_out(variant: str) -> str:
    """The feature that a variant needs and the glslc of this build did not support; empty if it was built."""
    path = built("spirv/left_out.txt")
    lines = path.read_text("utf-8").splitlines() if path else []
    return dict(line.split(maxsplit=1) for line in lines).get(variant, "")
