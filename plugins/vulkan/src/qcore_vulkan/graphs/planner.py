"""`Planner`: a builder that reuses scratch memory as soon as no value in it is needed any longer."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from .. import native
from ..builder import Builder, Ref, aligned, words
from ..device import Device

_T = TypeVar("_T")
_SMALL = 4096
_SLAB = 1 << 15
"""Bytes of room for small ranges that are reserved at once."""


class Planner(Builder):
    """A builder whose scratch memory has lifetimes: `free` gives a range back to later steps.

    A range that is freed is given away only after the next step that waits: a step that wrote it earlier would have to
    wait for those that read it, while it could run beside them. The arena of the program is as large as what lives at
    once, what waits for that, and what lies between.

    ``small``: ranges of up to this many bytes are never given away, nor do they lie where others have been, so that
    steps that compute positions and indices of all layers run side by side at the beginning.
    """

    def __init__(self, device: Device, small: int = _SMALL):
        super().__init__(device)
        self._small = small
        self._holes: list[tuple[int, int]] = []  # free ranges below the top: offset, bytes; in order, none adjacent
        self._slab = 0, 0  # where the next small range goes, and the end of the room for them
        self._freed: list[tuple[int, int]] = []  # since the last step that waits
        self._prepared: dict[int, dict[Hashable, Any]] = defaultdict(dict)  # by the offset of what they come from
        self._derived: dict[int, list[Ref]] = {}  # by the same offset: memory that lives as long as this one
        self._made: dict[int, Ref] = {}  # living ranges by offset, in the order in which they were made

    def scratch(self, nbytes: int) -> Ref:
        """Memory on the device until `free`, `rewind` or `settle`."""
        at = self._fresh(aligned(nbytes)) if nbytes <= self._small else self._hole(aligned(nbytes))
        ref = super().scratch(nbytes) if at is None else self._at(at, nbytes)
        self._made[ref.offset] = ref
        return ref

    def _fresh(self, nbytes: int) -> int:
        """Take memory that no step has used."""
        at, end = self._slab
        if at + nbytes > end:
            at, below = self._used[native.ARENA], self._top
            end = self._top = self._used[native.ARENA] = at + max(_SLAB, nbytes)
            if below < at:
                self._release(below, at - below)
        self._slab = at + nbytes, end
        return at

    def _at(self, offset: int, nbytes: int) -> Ref:
        return Ref(native.ARENA, offset, words(nbytes))

    def _hole(self, nbytes: int) -> int | None:
        """Take the smallest hole that fits; None if there is none."""
        fitting = [(size, offset) for offset, size in self._holes if size >= nbytes]
        if not fitting:
            return None
        size, offset = min(fitting)
        self._holes.remove((offset, size))
        if size > nbytes:
            bisect.insort(self._holes, (offset + nbytes, size - nbytes))
        return offset

    def prepared(self, source: Ref, key: Hashable, make: Callable[[], _T]) -> _T:
        """As `Builder.prepared`: equal steps once, whose memory lives until that of ``source`` is freed."""
        if source.buffer != native.ARENA or source.offset not in self._made:
            return make()
        known, key = self._prepared[source.offset], (source.bytes, key)
        if key not in known:
            before = set(self._made)
            known[key] = make()
            self._derived.setdefault(source.offset, []).extend(r for at, r in self._made.items() if at not in before)
        found: _T = known[key]
        return found

    def forget(self, ref: Ref) -> None:
        """Note that a step writes into ``ref``: what was prepared from it is of no use to later steps."""
        if ref.buffer == native.ARENA:
            self._prepared.pop(ref.offset, None)

    def mark(self) -> int:
        """How many ranges live: for `rewind`."""
        return len(self._made)

    def rewind(self, mark: int) -> None:
        """Free what was allocated since `mark`."""
        self.settle(mark, ())

    def settle(self, mark: int, kept: Iterable[Ref]) -> None:
        """Free what was allocated since `mark` but for the ranges ``kept``, and what was `prepared`."""
        offsets = {ref.offset for ref in kept if ref.buffer == native.ARENA}
        offsets |= {ref.offset for refs in self._derived.values() for ref in refs}
        offsets |= set() if self._zeros is None else {self._zeros.offset}
        for ref in [*self._made.values()][mark:]:
            if ref.offset not in offsets:
                self.free(ref)

    def free(self, ref: Ref) -> None:
        """Let later steps use a range that `scratch` has given; does nothing for other memory."""
        if ref.buffer != native.ARENA or ref.offset not in self._made:
            return
        self._prepared.pop(ref.offset, None)
        for derived in self._derived.pop(ref.offset, ()):
            self.free(derived)
        made = self._made.pop(ref.offset)
        if made.bytes > self._small:
            self._freed.append((made.offset, aligned(made.bytes)))

    def waited(self) -> None:
        for offset, size in self._freed:
            self._release(offset, size)
        self._freed.clear()

    def _release(self, offset: int, size: int) -> None:
        """Add a range to the holes, joined with its neighbours."""
        at = bisect.bisect(self._holes, (offset, 0))
        if at < len(self._holes) and self._holes[at][0] == offset + size:
            size += self._holes.pop(at)[1]
        if at and sum(self._holes[at - 1]) == offset:
            offset, before = self._holes.pop(at - 1)
            size += before
        if offset + size == self._top:
            self._top = offset
        else:
            bisect.insort(self._holes, (offset, size))
