"""The last few programs of a weight or a chain, by what they depend on."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_KEPT = 32
"""A program is a recorded command buffer: a few kilobytes. A text generator sees as many row counts as prompts."""


class Programs(Generic[K, V]):
    """A bounded cache, the least recently used one goes first. Threads may share it."""

    def __init__(self, most: int = _KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """What is kept under ``key``, else what ``make`` gives."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        made = make()  # outside the lock: it may take long, and two threads that make the same do no harm
        self.put(key, made)
        return made

    def put(self, key: K, made: V) -> None:
        """Keep ``made`` under ``key``, whatever was there."""
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        """Forget them all."""
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)
