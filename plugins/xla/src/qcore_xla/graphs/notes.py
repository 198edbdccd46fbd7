"""What programs note while they run: indices out of range, and integers that need more than 32 bits.

On CPUs, and for programs without states, the call that met them raises. A decode step on a GPU does not wait for that:
its results are NaN, and the next call of any program on the device raises.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from jax import Array
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..engines.crossing import tensor_of

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


class _Note(NamedTuple):
    """What one call has noted, on its way to the host.

    **Fields:** ``there``: kept until it has been copied ``here``; ``written``: when it has been, None on a CPU.
    """

    there: Tensor
    here: Tensor
    written: torch.cuda.Event | None

    def raise_it(self, device: torch.device) -> None:
        """Wait for the note, and raise what it says."""
        try:
            if self.written is not None:
                self.written.synchronize()
        finally:  # a GPU that fails, as by an assertion about the NaN, has mostly written the note before
            check(self.here, _EARLIER.format(device))


def note_late(device: torch.device, bad: Array) -> None:
    """Queue the copy of a program's notes to the host; `raise_late` looks at them."""
    there = tensor_of(bad, device) if device.type == "cuda" else from_dlpack(bad)
    here = torch.zeros(2, dtype=torch.bool, pin_memory=there.is_cuda)
    here.copy_(there, non_blocking=True)
    written = None
    if there.is_cuda:
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        written.record(torch.cuda.current_stream(there.device))
    with _lock:
        _taken.setdefault(device, []).append(_Note(there, here, written))


def raise_late(device: torch.device) -> None:
    """Raise what earlier calls on a device have noted, each note once."""
    while True:
        with _lock:
            queue = _taken.get(device)
            if not queue:
                return
            first = queue.pop(0)
        first.raise_it(device)


_taken: dict[torch.device, list[_Note]] = {}
_lock = threading.Lock()
