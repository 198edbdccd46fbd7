"""Matches regular expressions from untrusted files against names of layers, in bounded time.

Python's own matcher backtracks: a hostile expression keeps it busy for years. Here the set of positions at which a part
of the expression can end is computed in one step, as the bits of an integer: bit i is the position before character i.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

_LONGEST, _LONGEST_NAME = 2000, 1000
_STEPS = 100_000
"""Of one match; a usual one takes 10 to 50."""
_STEPS_OF_ALL, _STEPS_PER_NAME = 2_000_000, 500
_CHARACTERS_OF_ALL = 200_000
_FLAGS = re.UNICODE.value
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda c: c.isalnum() or c == "_",
}


class NamePattern:
    """A regular expression; raises `ValueError` if it is invalid in Python or uses unsupported features.

    Groups, alternatives, repeats, classes, anchors and assertions are supported; back references and flags are not.
    """

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise ValueError(f"it is longer than {_LONGEST} characters")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Python about odd expressions
                self._tree = _parser.parse(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"it is not a regular expression: {error}") from None
        if self._tree.state.flags & ~_FLAGS:
            raise ValueError("flags are not supported")

    def matches(self, name: str) -> bool:
        """Whether it matches at the start of ``name``, as `re.match` does."""
        return self.walk(_Walk(name))

    def walk(self, walk: _Walk) -> bool:
        """As `matches`, for the name of ``walk``."""
        walk.steps = 0
        try:
            return walk.ends(self._tree, 1) != 0
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


class TooManyStepsError(Exception):
    """The comparisons of a file's expressions with its names take too long; each may be harmless."""


class NamePatterns:
    """The expressions of one file, in order, each parsed once; their comparisons with names take bounded time in all.

    `add` raises `ValueError` for an unsupported expression; both methods raise `TooManyStepsError`.
    """

    def __init__(self) -> None:
        self._patterns: list[tuple[NamePattern, int]] = []
        self._known: set[str] = set()
        self._steps, self._characters = _STEPS_OF_ALL, _CHARACTERS_OF_ALL

    def add(self, text: str, value: int) -> None:
        """Add an expression with a value, not smaller than those of the expressions before it."""
        if text in self._known:  # the first of equal ones decides
            return
        self._characters -= len(text)
        if self._characters < 0:
            raise TooManyStepsError(f"its regular expressions have more than {_CHARACTERS_OF_ALL:,} characters")
        self._known.add(text)
        self._patterns.append((NamePattern(text), value))

    def first(self, name: str, below: int) -> int | None:
        """The value of the first expression that matches ``name``, of those with a value ``below`` the given one."""
        if not self._patterns:
            return None
        self._steps += _STEPS_PER_NAME
        walk = _Walk(name)
        for pattern, value in self._patterns:
            if value >= below:
                break
            found = pattern.walk(walk)
            self._steps -= walk.steps
            if self._steps < 0:
                raise TooManyStepsError(f"its {len(self._patterns):,} regular expressions take too long to compare")
            if found:
                return value
        return None


class _Walk:
    """The match of expressions, one after the other, against one name."""

    def __init__(self, name: str) -> None:
        if len(name) > _LONGEST_NAME:
            raise ValueError(f"a name is longer than {_LONGEST_NAME} characters")
        self.size, self.steps = len(name), 0
        self.places: dict[str, int] = {}
        for place, char in enumerate(name):
            self.places[char] = self.places.get(char, 0) | 1 << place
        self.known: dict[tuple[str, int], int] = {}

    def ends(self, nodes: Iterable[tuple[Any, Any]], starts: int) -> int:
        """The positions where a sequence can end that begins at one of ``starts``."""
        self._count()
        for op, value in nodes:
            self._count()
            if not starts:
                break
            starts = self._step(str(op), value, starts)
        return starts

    def _count(self, steps: int = 1) -> None:
        self.steps += steps
        if self.steps > _STEPS:
            raise ValueError("it takes too long")

    def _step(self, op: str, value: Any, starts: int) -> int:
        if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return (starts & self._chars(op, value)) << 1
        if op == "SUBPATTERN" and not value[1] and not value[2]:
            return self.ends(value[3], starts)
        if op == "BRANCH":
            found = 0
            for branch in value[1]:
                found |= self.ends(branch, starts)
            return found
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(value[0], value[1], value[2], starts)
        if op == "AT":
            return starts & self._anchor(str(value))
        if op in ("ASSERT", "ASSERT_NOT"):
            return self._assert(value, starts, op == "ASSERT")
        raise ValueError(f"{op.lower()} is not supported")

    def _chars(self, op: str, value: Any) -> int:
        """The positions of characters that a node matches."""
        if op == "LITERAL":
            return self.places.get(chr(value), 0)
        key = (op, id(value))
        if key not in self.known:
            self._count(len(value) * len(self.places) // 8 if op == "IN" else 0)
            self.known[key] = self._where(lambda char: _takes(op, value, char))
        return self.known[key]

    def _where(self, wanted: Callable[[str], bool]) -> int:
        self._count(len(self.places) // 4)
        found = 0
        for char, places in self.places.items():
            found |= places if wanted(char) else 0
        return found

    def _repeat(self, low: int, high: int, body: Any, starts: int) -> int:
        if low == 0 and high >= self.size and len(body) == 1 and str(body[0][0]) == "ANY" and "\n" not in self.places:
            return ((2 << self.size) - 1) & -(starts & -starts)  # everything after the first start
        for _ in range(low):
            starts = self.ends(body, starts)
            if not starts:
                return 0
        found = new = starts
        for _ in range(min(high - low, self.size + 1)):
            new = self.ends(body, new) & ~found
            if not new:
                break
            found |= new
        return found

    def _anchor(self, kind: str) -> int:
        if kind in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return 1
        if kind in ("AT_END", "AT_END_STRING"):
            newline = self.places.get("\n", 0) & (1 << self.size >> 1)
            return 1 << self.size | (newline if kind == "AT_END" else 0)
        if kind != "AT_BOUNDARY":  # versions of Python disagree about \B
            raise ValueError(f"the anchor {kind.lower()} is not supported")
        word = self._where(_CATEGORIES["CATEGORY_WORD"])
        return word ^ word << 1

    def _assert(self, value: Any, starts: int, wanted: bool) -> int:
        direction, body = value
        width = 0 if direction > 0 else int(body.getwidth()[0])
        kept = 0
        self._count(self.size // 8)
        for place in range(self.size + 1):
            if starts >> place & 1:
                found = self.ends(body, 1 << place - width) if place >= width else 0
                if (bool(found) if direction > 0 else bool(found >> place & 1)) is wanted:
                    kept |= 1 << place
        return kept


def _takes(op: str, value: Any, char: str) -> bool:
    if op == "ANY":
        return char != "\n"
    if op in ("LITERAL", "NOT_LITERAL"):
        return (ord(char) == value) is (op == "LITERAL")
    if op == "RANGE":
        return bool(value[0] <= ord(char) <= value[1])
    if op == "CATEGORY":
        kind = str(value)
        opposite = kind.replace("_NOT_", "_")
        return _CATEGORIES[opposite](char) is (kind == opposite)
    items = [(str(kind), item) for kind, item in value]
    negated = items[:1] == [("NEGATE", None)]
    return any(_takes(kind, item, char) for kind, item in items[negated:]) is not negated
