"""Arguments that share memory with one that a graph writes: for each way in which they do, a program of its own.

AOT autograd makes one tensor of such arguments, and records at which places of it they are. Dynamo looks at neither
when it compares a call with those that it has captured.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .backends import Role

Overlap = tuple[tuple[Any, ...], ...]
"""For each argument that shares memory: its position among the arguments, and where it is in that memory."""
OTHERS: Overlap = (("others",),)
"""In the place of those beyond the `_MOST` that programs are compiled for."""
_MOST = 8
MANY = "its arguments share memory with what it writes in more ways than programs are compiled for"
_storage_of, _identity = Tensor.untyped_storage, operator.attrgetter("_cdata")


class Overlaps:
    """Finds in each call how arguments of one graph overlap."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self._all = [i for i, role in enumerate(roles) if role not in {Role.NUMBER, Role.WEIGHT}]
        self._fresh = [i for i in self._all if roles[i] is Role.FRESH]
        self._looked_at, self._written = self._all, frozenset(self._all)  # as long as nobody knows what it writes
        self._met: set[Overlap] = set()

    def set_written(self, written: Iterable[int]) -> None:
        """Note the positions of all arguments that the graph writes."""
        self._written = frozenset(written)
        self._looked_at = sorted({*self._fresh, *self._written}) if self._written else []

    def of(self, values: Sequence[Any]) -> Overlap:
        """What distinguishes a call: empty if nothing overlaps what the graph writes."""
        places = self._looked_at
        try:
            memories = [*map(_identity, map(_storage_of, [values[i] for i in places]))]
        except (NotImplementedError, RuntimeError):  # of a tensor without memory of its own: sparse, nested
            return ()
        if len({*memories}) == len(memories):
            return ()
        groups: dict[int, list[int]] = {}
        for place, memory in zip(places, memories, strict=True):
            groups.setdefault(memory, []).append(place)
        found = tuple(
            (place, *_where(values[place])) for group in groups.values() for place in self._overlapping(group, values)
        )
        if found and found not in self._met:
            if len(self._met) >= _MOST:
                return OTHERS
            self._met.add(found)
        return found

    def _overlapping(self, group: Sequence[int], values: Sequence[Any]) -> list[int]:
        """Those of one memory that overlap a written one, or are written and overlap another."""
        spans = {place: span(values[place]) for place in group}
        return [
            place
            for place in group
            if any(
                other != place and {place, other} & self._written and meet(spans[place], spans[other])
                for other in group
            )
        ]


def count_writes(values: Sequence[Any], overlap: Overlap) -> None:
    """Count a write to each argument that overlaps: torch has counted those of the one tensor that stood for them."""
    tensors = [values[place] for place, *_ in overlap]
    torch.autograd.graph.increment_version([one for one in tensors if not one.is_inference()])


def span(x: Tensor) -> tuple[int, int]:
    """The bytes from the first to behind the last element."""
    if not x.numel():
        return 0, 0
    last = sum((count - 1) * step for count, step in zip(x.shape, x.stride(), strict=True))
    first = int(x.storage_offset())
    return first * x.itemsize, (first + last + 1) * x.itemsize


def meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two spans have a byte in common."""
    return one[0] < other[1] and other[0] < one[1]


def _where(x: Tensor) -> tuple[Any, ...]:
    """All that AOT autograd takes from an argument for the tensor that stands for several."""
    base = x._base  # noqa: SLF001 - torch has no public name for it
    form = None if base is None else (base.dtype, base.shape, base.stride(), base.storage_offset())
    return x.storage_offset(), x.stride(), x.untyped_storage().nbytes(), form
