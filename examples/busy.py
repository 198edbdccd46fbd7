"""Whether other work takes the processors that a measurement needs."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

import torch

SECONDS = 0.4
BUSY = 0.15
"""From this share on, times say more about the other work than about what is measured."""


def share_taken() -> float:
    """The share of torch's CPU threads that other processes take at this moment: 0 on an idle machine.

    As many threads as torch has do nothing but compute; what they are kept from is what others have taken. That sees
    processes of other containers, and limits of this one, which lists of processes do not show.
    """
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        shares = list(pool.map(lambda _: _own_share(), range(threads)))
    return max(0.0, 1 - sum(shares) / threads)


def _own_share() -> float:
    start, computed = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start < SECONDS:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000)  # leaves Python's lock to the other threads
    return (time.thread_time() - computed) / (time.perf_counter() - start)


def warning(share: float) -> str:
    """A line for results measured while this share was taken; empty if that was little."""
    if share < BUSY:
        return ""
    return f"This machine is busy: other work took {share:.0%} of its CPUs. Do not rely on the times; run again later."
