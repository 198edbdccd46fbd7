"""What programs note while they run: indices out of range, and integers that need more than 32 bits.

On CPUs, and for programs without states, the call that met them raises. A decode step on a GPU does not wait for that:
its results are NaN, and the next call of any program on the device raises, as an assertion of a device does.
"""

from __future__ import annotations

import threading

import torch
from jax import Array
from torch import Tensor
from torch.utils.dlpack import from_dlpack

LATE = {"cuda"}
"""Platforms on which a note may be read late."""
_EARLIER = "\nThis was an earlier call of a compiled model on {}; its floating-point results are NaN."


def check(noted: Tensor, suffix: str = "") -> None:
    """Raise for ``(2,)`` booleans, see `lowering.Flags`."""
    outside, overflow = noted.tolist()
    if outside:
        raise IndexError(f"an index of an embedding, a cache or an indexing operation is out of range.{suffix}")
    if overflow:
        raise OverflowError(
            "an integer does not fit the 32 bits in which qcore_xla computes integers.\n"
            f"Compute large integers (hashes, products of ids) outside of the compiled model.{suffix}"
        )


class LateNotes:
    """The notes of one program that nobody has waited for yet: those of one call, as its calls follow each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._here: Tensor | None = None
        self._written: torch.cuda.Event | None = None

    def take(self, bad: Array) -> None:
        """Queue the copy of a program's notes to the host; `raise_late` looks at them."""
        there = from_dlpack(bad)
        if self._here is None:
            with torch.inference_mode(False):  # later calls may write to it outside of it
                self._here = torch.empty(2, dtype=torch.bool, pin_memory=there.is_cuda)
                self._written = torch.cuda.Event() if there.is_cuda else None  # type: ignore[no-untyped-call]
        self._here.copy_(there, non_blocking=True)
        if self._written is not None:
            self._written.record(torch.cuda.current_stream(there.device))
        with _lock:
            _taken.setdefault(self._device, []).append(self)

    def read(self) -> None:
        """Wait for the notes and raise what they say."""
        if self._written is not None:
            self._written.synchronize()
        if self._here is not None:
            check(self._here, _EARLIER.format(self._device))


def raise_late(device: torch.device) -> None:
    """Raise what earlier calls on a device have noted, once."""
    with _lock:
        found = _taken.pop(device, [])
    for notes in found:
        notes.read()


_taken: dict[torch.device, list[LateNotes]] = {}
_lock = threading.Lock()
