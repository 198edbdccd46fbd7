"""Properties of a device that kernels depend on."""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from typing import NamedTuple

import torch


class Device(NamedTuple):
    """**Fields:** ``arch``: 90 for sm_90, 0 if it is no NVIDIA GPU; ``hip``: AMD; ``sms``: multiprocessors.

    If it is neither, kernels run in Triton's interpreter.
    """

    arch: int
    hip: bool
    sms: int

    @property
    def interpreted(self) -> bool:
        """Whether kernels run in Triton's interpreter."""
        return not (self.arch or self.hip)

    @property
    def asm(self) -> bool:
        """Whether kernels may contain PTX."""
        return self.arch > 0

    @property
    def dependent(self) -> bool:
        """Whether a kernel may start before the previous one has ended (programmatic dependent launch)."""
        return self.arch >= 90

    @property
    def descriptors(self) -> bool:
        """Whether tensor descriptors (TMA) exist, and shared memory holds tiles large enough to profit from them."""
        return self.arch in {90, 100, 103}

    @property
    def shared(self) -> int:
        """The most bytes of shared memory per program."""
        return (64 if self.hip or not self.arch else _SHARED.get(self.arch, 99)) << 10


_SHARED = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
"""KiB per program by architecture (CUDA C++ Programming Guide, "Technical Specifications"); 99 for the others."""


def device_of(device: torch.device) -> Device:
    """The properties of ``device``."""
    return _device(device.type, device.index or 0)


_entered = threading.local()


def enter_context() -> None:
    """Make the GPU's context current in this thread, once: tensor maps can't be encoded without.

    CUDA's runtime does it with a thread's first kernel or copy, which a layer on a tensor of another thread precedes.
    """
    if not getattr(_entered, "done", False):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.mem_get_info()  # any call of the runtime that works while a graph is captured
        _entered.done = True


@lru_cache(maxsize=64)
def _device(kind: str, index: int) -> Device:
    if kind != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return Device(0, False, 4)
    facts = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    return Device(0 if hip else facts.major * 10 + facts.minor, hip, facts.multi_processor_count)
