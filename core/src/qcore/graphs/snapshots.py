"""What Python objects hold: to tell whether a call has changed an attribute of a model or of its arguments."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

SIMPLE = (int, float, bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.Size)
"""Types whose objects are what their values are."""
_OPAQUE = (type, ModuleType, FunctionType, MethodType)


def snapshot(roots: Mapping[str, Any]) -> dict[str, Any]:
    """All simple values and tensors that attributes, lists, tuples and dicts of ``roots`` lead to, by their paths."""
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}  # with the objects, whose identities would belong to others once they are gone
    queue = list(roots.items())
    while queue:
        path, one = queue.pop()
        if isinstance(one, (*SIMPLE, Tensor)):
            found[path] = one
        elif id(one) not in seen and not isinstance(one, _OPAQUE):
            seen[id(one)] = one
            parts = [(f"{path}{step}", part) for step, part in _parts(one)]
            found[f"{path}, its parts,"] = len(parts)
            queue += parts
    return found


def _parts(one: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(one, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in one.items())
    elif isinstance(one, (list, tuple)):
        yield from ((f"[{i}]", part) for i, part in enumerate(one))
    elif isinstance(one, (set, frozenset)):
        yield from ((f".{part!r}", part) for part in one if isinstance(part, SIMPLE))
    held = getattr(one, "__dict__", None)
    if isinstance(held, dict):
        yield from ((f".{name}", part) for name, part in held.items())


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterable[str]:
    """The paths at which two snapshots differ: values by type and value, tensors by identity."""
    for path in {**before, **after}:
        old, new = before.get(path, _MISSING), after.get(path, _MISSING)
        if old is not new and (isinstance(old, Tensor) or type(old) is not type(new) or old != new):
            yield path


_MISSING = object()
