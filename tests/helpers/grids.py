"""Exhaustive tests: `nox -s tests` runs a sample of their cases, `nox -s grids` those marked ``grid``, the others.

Both helpers give the parameters of a test. Which cases are in the sample depends on nothing but their number, so that
the two sessions together run each case once. CI runs `grids` in turns: tests/conftest.py.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], few: int) -> list[Any]:
    """Parameters for every case, all but ``few`` of them marked ``grid``; those few are spread evenly.

    A tuple is the values of several arguments, as in `pytest.mark.parametrize`.
    """
    cases = list(cases)
    last = len(cases) - 1
    chosen = {round(i * last / max(few - 1, 1)) for i in range(few)}
    return [_param(case, in_sample=i in chosen) for i, case in enumerate(cases)]


def draws(many: int, few: int, parts: int = 1) -> list[Any]:
    """Ranges of numbers that a fuzz test draws from: the first ``few`` in `tests`, the rest in ``parts`` in `grids`.

    The environment variable QCORE_FUZZ=N beats ``many``, the number of draws in all.
    """
    stop = int(os.environ.get("QCORE_FUZZ") or many)
    few = min(few, stop)
    edges = [few + (stop - few) * part // parts for part in range(parts + 1)]
    rest = [range(start, end) for start, end in itertools.pairwise(edges) if start < end]
    return [_param(range(few), in_sample=True, id=f"0-{few}"), *map(_of_grid, rest)]


def _of_grid(part: range) -> Any:
    return _param(part, in_sample=False, id=f"{part.start}-{part.stop}")


def _param(case: Any, *, in_sample: bool, id: str | None = None) -> Any:  # noqa: A002 - pytest's name
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=() if in_sample else pytest.mark.grid, id=id)
