"""The native library: its location, whether it can be loaded, and the instruction sets that it has kernels for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from qcore.plugin_api import first_line, has_values

FILES = ("libqcore_cpu.so", "libqcore_cpu.dylib", "qcore_cpu.dll")
OLDEST_TORCH = (2, 10)
"""The release whose stable interface the library is compiled for."""
ISA = "QCORE_CPU_ISA"
"""The variable that forces an instruction set."""


def library() -> Path | None:
    """The library's file: next to this module, or elsewhere on the package's ``__path__`` (editable); None if missing.

    `QCORE_CPU_LIBRARY` overrides the path, for development of the library.
    """
    if given := os.environ.get("QCORE_CPU_LIBRARY"):
        return Path(given)
    import qcore_cpu

    places = [Path(place) for place in qcore_cpu.__path__]
    return next((place / name for place in places for name in FILES if (place / name).is_file()), None)


@lru_cache(maxsize=1)
def fault() -> str:
    """Why the library cannot be used, and how to fix it; empty if it can. Loads it, which registers its ops."""
    version = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        return f"torch {torch.__version__} is too old: qcore-cpu needs torch 2.10 or newer."
    found = library()
    if found is None:
        return "its library was not built; install a wheel, or build it with a C++ compiler and CMake."
    try:
        torch.ops.load_library(str(found))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"its library cannot be loaded ({first_line(error)}); reinstall qcore-cpu."
    asked = os.environ.get(ISA, "")
    if isa() is None:
        return f"{ISA}={asked} names no instruction set that can be used here; choose one of: {' '.join(isas())}."
    return ""


@lru_cache(maxsize=1)
def handle() -> ctypes.CDLL:
    """The library for calls by ctypes, once `fault` has found none."""
    found = library()
    assert found is not None  # `fault` has checked this
    loaded = ctypes.CDLL(str(found))
    for name in ("qcore_cpu_isas", "qcore_cpu_isa"):
        getattr(loaded, name).restype = ctypes.c_char_p
    pointer, size, code, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
    loaded.qcore_cpu_form_size.restype = size
    loaded.qcore_cpu_form.restype = None
    loaded.qcore_cpu_form.argtypes = [pointer, size, size, size, *(code,) * 6, number, size, number, size]
    codes, scale, bias = (pointer, size), (pointer, code), (pointer, code)
    loaded.qcore_cpu_linear.argtypes = [pointer, pointer, size, *codes, *scale, pointer, *bias, pointer]
    loaded.qcore_cpu_make_huge_pages.restype, loaded.qcore_cpu_make_huge_pages.argtypes = None, [pointer, size]
    return loaded


def direct() -> tuple[Callable[..., int], Callable[..., None], int]:
    """``qcore_cpu_linear``, ``qcore_cpu_form`` and the bytes of a form; see ``native/host.cpp``."""
    library = handle()
    return library.qcore_cpu_linear, library.qcore_cpu_form, library.qcore_cpu_form_size()


def settled(packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same packed tensors, in huge pages where the system has them: ``native/pages.h`` says why."""
    for tensor in packed.values():
        if has_values(tensor) and tensor.is_cpu:
            handle().qcore_cpu_make_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return packed


def isas() -> list[str]:
    """The instruction sets that this processor has and the library has kernels for, best first."""
    return str(handle().qcore_cpu_isas().decode()).split()


def isa() -> str | None:
    """The one in use; None if `QCORE_CPU_ISA` names one that is not available."""
    name = handle().qcore_cpu_isa()
    return None if name is None else str(name.decode())


def lanes() -> int:
    """Numbers of 32 bits in a vector of the instruction set in use."""
    name = isa() or ""
    return 16 if name.startswith(("avx512", "amx")) else 8 if name.startswith("avx") else 4
