"""Which steps of a program must wait for which: what each reads and writes, found in the SPIR-V of its shader."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from . import native

READ, WRITE, ATOMIC = 1, 2, 4
"""Flags of how a step uses a binding. Atomic updates that commute need not wait for each other."""

_HEADER = 5
_OP_TYPE_POINTER, _OP_VARIABLE, _OP_DECORATE, _OP_MEMBER_DECORATE = 32, 59, 71, 72
_NON_WRITABLE, _NON_READABLE, _BINDING = 24, 25, 33

Span = tuple[int, int, int]
"""Bytes of a buffer: its number, the first, and the one after the last."""


@lru_cache(maxsize=256)
def of_variant(variant: str) -> tuple[int, ...]:
    """How each binding of a variant is used: flags, 0 for a binding that the shader does not have."""
    return of_module(native.spirv(variant))


def of_module(module: bytes) -> tuple[int, ...]:
    """How each binding of a SPIR-V module is used, by the ``readonly`` and ``writeonly`` of its declarations."""
    words = struct.unpack(f"<{len(module) // 4}I", module[: len(module) // 4 * 4])
    pointed: dict[int, int] = {}
    variables: dict[int, int] = {}
    bindings: dict[int, int] = {}
    denied: dict[int, int] = defaultdict(int)
    at = _HEADER
    while at < len(words):
        count, op = words[at] >> 16, words[at] & 0xFFFF
        if op == _OP_TYPE_POINTER:
            pointed[words[at + 1]] = words[at + 3]
        elif op == _OP_VARIABLE:
            variables[words[at + 2]] = words[at + 1]
        elif op in (_OP_DECORATE, _OP_MEMBER_DECORATE):
            target, decoration = words[at + 1], words[at + 2 + (op == _OP_MEMBER_DECORATE)]
            if decoration == _BINDING:
                bindings[target] = words[at + 3]
            elif decoration in (_NON_WRITABLE, _NON_READABLE):
                denied[target] |= WRITE if decoration == _NON_WRITABLE else READ
        at += count
    flags = [0] * native.BINDINGS
    for variable, binding in bindings.items():
        flags[binding] |= (READ | WRITE) & ~denied[variable] & ~denied[pointed[variables[variable]]]
    return tuple(flags)


@dataclass(frozen=True)
class Use:
    """Bytes that a step uses, and how."""

    span: Span
    flags: int


def uses(spans: Sequence[Span | None], flags: Iterable[int]) -> list[Use]:
    """What a step uses, given the bytes and the flags of its bindings; those without either are left out."""
    return [Use(span, used) for span, used in zip(spans, flags, strict=False) if span is not None and used]


class Hazards:
    """What steps have used since the last barrier."""

    def __init__(self) -> None:
        self._uses: list[Use] = []

    def waits(self, own: Sequence[Use], wanted: bool | None = None) -> bool:
        """Whether a step that uses these bytes waits for the steps before it. Notes it as the next one.

        ``wanted``: by default it does if it must.
        """
        waits = any(_conflict(one, other) for one in own for other in self._uses) if wanted is None else wanted
        if waits:
            self._uses.clear()
        self._uses += own
        return waits


def levels(steps: Iterable[Sequence[Use]]) -> list[int]:
    """The earliest level at which each step can run: one above every earlier step with which it shares bytes.

    Steps of a level do not conflict, so that one barrier between two levels is enough.
    """
    seen: dict[int, dict[tuple[int, int, int], int]] = defaultdict(dict)  # by buffer: bytes and flags, to the level
    found = []
    for own in steps:
        level = 0
        for use in own:
            buffer, start, end = use.span
            for (first, last, flags), other in seen[buffer].items():
                if other >= level and start < last and first < end and _ordered(use.flags, flags):
                    level = other + 1
        for use in own:
            _note(seen[use.span[0]], use, level)
        found.append(level)
    return found


def _note(seen: dict[tuple[int, int, int], int], use: Use, level: int) -> None:
    """Add a use; a write hides what lies within it: whoever conflicts with that conflicts with the write."""
    _, start, end = use.span
    if use.flags & WRITE:
        for key in [key for key, other in seen.items() if start <= key[0] and key[1] <= end and other < level]:
            del seen[key]
    key = (start, end, use.flags)
    seen[key] = max(level, seen.get(key, 0))


def _conflict(one: Use, other: Use) -> bool:
    (a, start, end), (b, first, last) = one.span, other.span
    return _ordered(one.flags, other.flags) and a == b and start < last and first < end


def _ordered(one: int, other: int) -> bool:
    """Whether two uses of the same bytes must keep their order."""
    return bool((one | other) & (WRITE | ATOMIC)) and not one == other == ATOMIC
