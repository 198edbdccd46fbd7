"""What Python objects hold: whether a call has changed an attribute, and whether what was reached is still there."""

from __future__ import annotations

import enum
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

SIMPLE = (int, float, bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.Size)
"""Types whose objects are what their values are."""
_OPAQUE = (type, ModuleType, FunctionType, MethodType)


def snapshot(roots: Mapping[str, Any]) -> dict[str, Any]:
    """All simple values and tensors that attributes and containers lead to from ``roots``, by their paths."""
    found: dict[str, Any] = {}
    for path, one in _reached(roots):
        if isinstance(one, (*SIMPLE, Tensor)):
            found[path] = one
        else:
            found[f"{path}, its parts,"] = len(_parts(one))
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterable[str]:
    """The paths at which two snapshots differ: values by type and value, tensors by identity."""
    for path in {**before, **after}:
        old, new = before.get(path, _MISSING), after.get(path, _MISSING)
        if old is not new and (isinstance(old, Tensor) or type(old) is not type(new) or old != new):
            yield path


class Contents:
    """What an object and all that it leads to hold, to be looked at often: by identity, so that nothing is compared."""

    def __init__(self, root: Any) -> None:
        self._mappings: list[Any] = []
        self._sequences: list[Any] = []
        self._sets: list[tuple[Any, frozenset[Any]]] = []
        for _, one in _reached({"": root}):
            if isinstance(one, (list, tuple, deque)):
                self._sequences.append(one)
            elif isinstance(one, (set, frozenset)):
                self._sets.append((one, frozenset(one)))
            self._mappings += _mappings(one)
        self._held = [*(one.values() for one in self._mappings), *self._sequences]  # views, which follow their mappings
        self._sizes, self._keys = [*map(len, self._held)], [*chain.from_iterable(self._mappings)]
        self._known = [*chain.from_iterable(self._held)]

    def is_same(self) -> bool:
        """Whether every container still holds the same objects, in the same order."""
        return (
            [*map(len, self._held)] == self._sizes
            and all(map(operator.is_, chain.from_iterable(self._held), self._known))
            and [*chain.from_iterable(self._mappings)] == self._keys
            and all(held == known for held, known in self._sets)
        )


def _reached(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Paths and objects: simple values and tensors, and each other object once."""
    seen: dict[int, Any] = {}  # with the objects, whose identities would belong to others once they are gone
    queue = list(roots.items())
    while queue:
        path, one = queue.pop()
        if isinstance(one, (*SIMPLE, Tensor)):
            yield path, one
        elif id(one) not in seen and not isinstance(one, _OPAQUE):
            seen[id(one)] = one
            yield path, one
            queue += [(f"{path}{step}", part) for step, part in _parts(one)]


def _mappings(one: Any) -> list[Mapping[Any, Any]]:
    held = getattr(one, "__dict__", None)
    found = [one] if isinstance(one, Mapping) else []
    return [*found, held] if isinstance(held, dict) else found


def _parts(one: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    if isinstance(one, Mapping):
        found += [(f"[{key!r}]", part) for key, part in one.items()]
    elif isinstance(one, (list, tuple, deque)):
        found += [(f"[{i}]", part) for i, part in enumerate(one)]
    elif isinstance(one, (set, frozenset)):
        found += [(f".{part!r}", part) for part in one if isinstance(part, SIMPLE)]
    held = getattr(one, "__dict__", None)
    if isinstance(held, dict):
        found += [(f".{name}", part) for name, part in held.items()]
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        found += [(f".{name}", getattr(one, name)) for name in names if name[:2] != "__" and hasattr(one, name)]
    return found


_MISSING = object()
