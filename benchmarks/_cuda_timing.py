"""Timing on a CUDA device: graph replays in turns, host time of eager calls, and the two ceilings of the machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

Call = Callable[[], object]

ROUNDS = 9
"""Rounds of replays; medians over them are reported."""
REPLAY_MS = 1.0
"""How long one replay takes at least: much longer than launching a graph."""
MOST_CALLS = 200
"""Calls captured in one graph at most."""


class Replay:
    """A CUDA graph of several calls, each over another copy of its weight."""

    def __init__(self, calls: Sequence[Call]) -> None:
        for call in calls[:2]:  # compiles, fills caches, picks algorithms: nothing of that may be captured
            call()
        torch.cuda.synchronize()
        each = self._estimate(calls)
        turns = math.ceil(min(MOST_CALLS, REPLAY_MS / each) / len(calls))
        self.count = turns * len(calls)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(turns):
                for call in calls:
                    call()
        self._graph.replay()
        torch.cuda.synchronize()

    @staticmethod
    def _estimate(calls: Sequence[Call]) -> float:
        """Milliseconds of one call, launch included: no more than a hint."""
        start = time.perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize()
        return max((time.perf_counter() - start) * 1e3 / len(calls), 2e-3)

    def start(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Replay once between two events."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        self._graph.replay()
        after.record()
        return before, after


def in_turns(replays: Sequence[Replay], rounds: int = ROUNDS) -> list[float]:
    """Median microseconds of one call of each. Replays take turns, so that clocks and heat hit all alike."""
    times: list[list[float]] = [[] for _ in replays]
    for _ in range(rounds):
        events = [replay.start() for replay in replays]
        torch.cuda.synchronize()
        for own, (before, after), replay in zip(times, events, replays, strict=True):
            own.append(before.elapsed_time(after) * 1e3 / replay.count)
    return [statistics.median(own) for own in times]


def host_times(calls: Sequence[Call], rounds: int = 25, burst: int = 40) -> list[float]:
    """Median microseconds that the host is busy with one call of each; bursts take turns and never fill the queue."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, own in zip(calls, times, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(burst):
                call()
            own.append((time.perf_counter() - start) / burst * 1e6)
    torch.cuda.synchronize()
    return [statistics.median(own) for own in times]


@triton.jit
def _read(source, sums, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * (TURNS * BLOCK) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for _ in range(TURNS):
        total += tl.load(source + at)
        at += BLOCK
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read_bandwidth() -> float:
    """Bytes per second that reading a tensor much larger than the cache reaches: the best of several block sizes."""
    words = min(1 << 30, torch.cuda.mem_get_info()[0] // 16) & ~0xFFFFF
    source = torch.randint(0, 8, (words,), dtype=torch.int32, device="cuda")
    best = 0.0
    for block, turns, warps in ((4096, 8, 4), (8192, 8, 8), (2048, 16, 4), (4096, 32, 8)):
        programs = words // (block * turns)
        sums = torch.empty(programs, dtype=torch.int32, device="cuda")

        def read(block: int = block, turns: int = turns, warps: int = warps, sums: Tensor = sums) -> None:
            _read[(len(sums),)](source, sums, turns, block, num_warps=warps)

        best = max(best, source.nbytes / (_milliseconds(read) / 1e3))
    return best


def multiply_rate() -> float:
    """Operations per second of a large bfloat16 product of random numbers."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (_milliseconds(lambda: a @ b) / 1e3)


def _milliseconds(call: Call, count: int = 7) -> float:
    times = []
    for _ in range(count + 1):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after))
    return statistics.median(times[1:])
