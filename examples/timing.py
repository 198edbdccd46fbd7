"""Latency of several functions, measured in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)


def medians(calls: Mapping[Key, Callable[[], Any]], seconds: float, device: torch.device) -> dict[Key, float]:
    """Median milliseconds of each call, all of them together in about ``seconds`` and at least five rounds.

    The calls take turns, so that a slow moment of the machine hits all alike and ratios stay meaningful. A call has
    ended when ``device`` has.
    """
    for call in calls.values():
        call()
    times: dict[Key, list[float]] = {name: [] for name in calls}
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or min(map(len, times.values())) < 5:
        for name, call in calls.items():
            _wait_for(device)
            start = time.perf_counter()
            call()
            _wait_for(device)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(measured) for name, measured in times.items()}


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
