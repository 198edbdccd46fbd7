"""What kernels have to know of a device."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import torch


class Device(NamedTuple):
    """**Fields:** ``arch``: 90 for sm_90, 0 where there is none; ``hip``: AMD; ``sms``: multiprocessors.

    Without any of the two, kernels run in Triton's interpreter.
    """

    arch: int
    hip: bool
    sms: int

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
        """Whether there are tensor descriptors (TMA)."""
        return self.arch >= 90


def device_of(device: torch.device) -> Device:
    """The facts about ``device``."""
    return _device(device.type, device.index or 0)


@lru_cache(maxsize=64)
def _device(kind: str, index: int) -> Device:
    if kind != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return Device(0, False, 4)
    facts = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    return Device(0 if hip else facts.major * 10 + facts.minor, hip, facts.multi_processor_count)
