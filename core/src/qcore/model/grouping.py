"""Rows of a report that differ only in the numbers in their names: the layers of equal blocks, as one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

_Row = TypeVar("_Row")
_NUMBER = re.compile(r"[0-9]{1,9}")  # longer ones do not number blocks, and Python refuses to convert very long ones
_FEWEST = 3  # two lines are as quick to read as one line for both


def grouped(
    rows: Iterable[_Row], name: Callable[[_Row], str], alike: Callable[[_Row], Hashable]
) -> list[tuple[str, list[_Row]]]:
    """Group three or more rows whose names differ only in their numbers and whose ``alike`` is equal.

    Returns labels and rows in the order of the first row of each group. A label is the name of a single row, or e.g.
    ``24 x model.layers.*.mlp.up_proj``; if other rows have such a name, too, the numbers are spelled out:
    ``12 x model.layers.{0-11}.mlp.up_proj``.
    """
    groups: dict[tuple[str, Hashable], list[tuple[int, _Row]]] = {}
    with_pattern: dict[str, int] = {}
    for place, row in enumerate(rows):
        pattern = _pattern(name(row))
        with_pattern[pattern] = with_pattern.get(pattern, 0) + 1
        groups.setdefault((pattern, alike(row)), []).append((place, row))
    lines: list[tuple[int, str, list[_Row]]] = []
    for (pattern, _), members in groups.items():
        if len(members) < _FEWEST:
            lines += [(place, name(row), [row]) for place, row in members]
        else:
            label = _label([name(row) for _, row in members], everywhere=with_pattern[pattern] == len(members))
            lines.append((members[0][0], f"{len(members)} x {label}", [row for _, row in members]))
    lines.sort(key=lambda line: line[0])
    return [(label, together) for _, label, together in lines]


def _pattern(name: str) -> str:
    return ".".join("*" if _NUMBER.fullmatch(part) else part for part in name.split("."))


def _label(names: Sequence[str], *, everywhere: bool) -> str:
    """Return the common name, with ``*`` or the numbers for each part that differs."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(_part(list(dict.fromkeys(column)), everywhere=everywhere) for column in columns)


def _part(values: list[str], *, everywhere: bool) -> str:
    if len(values) == 1:
        return values[0]
    return "*" if everywhere else "{" + ",".join(_ranges(sorted(map(int, values)))) + "}"


def _ranges(numbers: list[int]) -> list[str]:
    """Return sorted numbers as ranges: ``[0, 1, 2, 5]`` gives ``["0-2", "5"]``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
