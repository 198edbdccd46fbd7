"""Triton as it is here: whether it can serve Intel GPUs, and launching its kernels."""

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

_REMEDY = (
    "Triton for Intel GPUs comes with the XPU build of torch, as the distribution triton-xpu or, with older ones, "
    "pytorch-triton-xpu: reinstall both from where that build came from."
)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU; as good as decided once Triton has been imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "yes", "on", "y"}


@lru_cache(maxsize=2)
def _fault(interpreter: bool) -> str:
    found = importlib.util.find_spec("triton")
    if found is None:
        return f"Triton is not installed. {_REMEDY}"
    places = found.submodule_search_locations or ()
    if interpreter or any((Path(place) / "backends" / "intel").is_dir() for place in places):
        return ""
    return f"the Triton installed has no part for Intel GPUs; another distribution may have overwritten it. {_REMEDY}"


def why_not_triton() -> str:
    """Why kernels in Triton cannot run here, with the remedy; empty where they can. Does not import it."""
    return _fault(interpreted())


_one_at_a_time = threading.Lock()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run a kernel on the current device and stream: ``args`` for its first parameters, constexprs and options."""
    with _interpreting() if interpreted() else contextlib.nullcontext():
        kernel[grid](*args, **meta)


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """Triton's interpreter keeps its state in one place, and numpy warns of NaN and overflow, where a GPU goes on."""
    import numpy as np

    with _one_at_a_time, np.errstate(all="ignore"):
        yield


def options(warps: int) -> dict[str, Any]:
    """Options of a launch: ``warps`` sub-groups per program; programmatic dependent launch is NVIDIA's."""
    return {"PDL": False, "num_warps": warps}


def sub_groups(values: int) -> int:
    """Sub-groups of a program that holds ``values``, a power of two: 512 for each, at most 32, a whole work-group."""
    return max(1, min(32, values // 512))


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, by position."""
    return torch.empty(shape, dtype=dtype, device=device)
