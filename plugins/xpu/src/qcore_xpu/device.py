"""The installed Triton: whether it supports Intel GPUs, and launches of its kernels."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DPAS_LANES = 16
"""Lanes of a sub-group for DPAS as Triton emits it; GPUs with 8 need another form, which it does not emit."""
_REMEDY = (
    "Triton for Intel GPUs comes with the XPU build of torch, as the package triton-xpu or, with older ones, "
    "pytorch-triton-xpu: reinstall both from the package index of that build."
)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU; effectively fixed once Triton has been imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "yes", "on", "y"}


@lru_cache(maxsize=2)
def _fault(interpreter: bool) -> str:
    found = importlib.util.find_spec("triton")
    if found is None:
        return f"Triton is not installed. {_REMEDY}"
    places = found.submodule_search_locations or ()
    if interpreter or any((Path(place) / "backends" / "intel").is_dir() for place in places):
        return ""
    return f"the installed Triton has no backend for Intel GPUs; another package may have overwritten it. {_REMEDY}"


def why_not_triton() -> str:
    """Why kernels in Triton cannot run here, and how to fix it; empty if they can. Does not import Triton."""
    return _fault(interpreted())


_ELSE = "Torch ops run this layer; w8a8 per channel and float activations run on oneDNN here."


def why_not_int8(device: torch.device) -> str:
    """Why Triton's int8 products are refused on ``device``, and how to fix it; empty if they are supported.

    Without DPAS, Triton multiplies int8 on its FMA path, which is inexact.
    """
    return "" if device.type != "xpu" or interpreted() else _without_dpas(device)


@lru_cache(maxsize=64)
def _without_dpas(device: torch.device) -> str:
    # By getattr: releases of torch differ in the properties that they report.
    told = torch.xpu.get_device_properties(device)
    sizes = getattr(told, "sub_group_sizes", None) or ()
    if sizes and min(sizes) < _DPAS_LANES:
        return (
            f"Triton does not use DPAS on GPUs with sub-groups of {min(sizes)} lanes, such as {told.name} (it needs "
            f"{_DPAS_LANES}), and without DPAS its int8 products are inexact. {_ELSE}"
        )
    if not getattr(told, "has_subgroup_matrix_multiply_accumulate", True):
        return (
            f"{told.name} is reported to have no DPAS, without which Triton's int8 products are inexact. If the GPU "
            f"has it, as all Arc B and Core Ultra 200V do, install ocloc (package intel-ocloc), which torch queries, "
            f"and restart. {_ELSE}"
        )
    return ""


class _Narrowing:
    """Settings that let oneDNN round float32 operands: the first user switches them off, the last one restores them."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._undo: list[tuple[Any, str, Any]] = []

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._switch_off()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    while self._undo:
                        setattr(*self._undo.pop())

    def _switch_off(self) -> None:
        onednn: Any = torch.backends.mkldnn  # its flags are bool at run time, but not for mypy
        whole = onednn.fp32_precision
        for one in (onednn.matmul, onednn.conv):
            precision = one.fp32_precision
            if precision in {"tf32", "bf16"}:
                # An inherited value is reported as its own; "none" makes it inherit again.
                self._undo.append((one, "fp32_precision", "none" if precision == whole else precision))
                one.fp32_precision = "ieee"
        if onednn.allow_tf32:
            self._undo.append((onednn, "allow_tf32", True))
            onednn.allow_tf32 = False


_narrowing = _Narrowing()


def exact(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    """Keep products of float32 exact, even if the user lets oneDNN round operands to TF32 or bfloat16.

    Safe in any number of threads. The setting is process-wide: products of other threads are exact meanwhile, too.
    """
    return _narrowing.off() if dtype == torch.float32 else contextlib.nullcontext()


_one_at_a_time = threading.Lock()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run a kernel on the current device and stream: ``args`` for its first parameters, constexprs and options."""
    with _interpreting() if interpreted() else contextlib.nullcontext():
        kernel[grid](*args, **meta)


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """One thread at a time: Triton's interpreter has global state. Without numpy's warnings about NaN, as on a GPU."""
    import numpy as np

    with _one_at_a_time, np.errstate(all="ignore"):
        yield


def options(warps: int) -> dict[str, Any]:
    """Options of a launch: ``warps`` sub-groups per program; programmatic dependent launch is for NVIDIA only."""
    return {"PDL": False, "num_warps": warps}


def sub_groups(values: int) -> int:
    """Sub-groups of a program that holds ``values``, a power of two: 512 for each, at most 32, a whole work-group."""
    return max(1, min(32, values // 512))


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, by position."""
    return torch.empty(shape, dtype=dtype, device=device)
