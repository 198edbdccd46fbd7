"""A cache for the last few programs of a weight or a chain."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_KEPT = 32
"""A program is a recorded command buffer: a few kilobytes. Text generation sees as many row counts as prompts."""


class Programs(Generic[K, V]):
    """A bounded cache: the least recently used program is dropped first.

    Threads share it without a lock, which a forked process could inherit locked: at worst, two create the same one.
    """

    def __init__(self, most: int = _KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value kept under ``key``, else the result of ``make``."""
        found = self._kept.get(key)
        if found is None:
            found = make()
            self.put(key, found)
        else:
            with contextlib.suppress(KeyError):  # another thread has just dropped it
                self._kept.move_to_end(key)
        return found

    def put(self, key: K, made: V) -> None:
        """Keep ``made`` under ``key``; replaces an earlier value."""
        self._kept[key] = made
        while len(self._kept) > self._most:
            with contextlib.suppress(KeyError):
                self._kept.popitem(last=False)

    def clear(self) -> None:
        """Forget them all."""
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)
