"""What all tests share: a fixture, a quick garbage collector, and the turns of exhaustive tests.

With the variable ALTERNATE_TURN=N half of the tests marked `alternate` are left, the other half if N is odd than if it
is even. With the variable GRID_TURN=N only one of 30 parts of the tests marked `grid` is left, that of N modulo 30.
Tests that share what takes long are in one part: those of a module that is marked `grid`, and those marked with one
name, `grid("NAME")` or `alternate("NAME")`.
"""

from __future__ import annotations

import gc
import os
import zlib

import pytest

TURNS = 30


@pytest.fixture
def fresh_compiler():
    """torch.compile has compiled nothing yet, and nothing of the test stays."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set[pytest.Item]()
    if turn := os.environ.get("GRID_TURN"):
        left_out |= {item for item in items if item.get_closest_marker("grid") and not _in_turn(item, int(turn))}
    if turn := os.environ.get("ALTERNATE_TURN"):
        halves = [item for item in items if item.get_closest_marker("alternate")]
        left_out |= {item for item in halves if (zlib.crc32(_key(item, "alternate").encode()) + int(turn)) % 2}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: looking through it costs a second in each collection."""
    gc.collect()
    gc.freeze()


def _in_turn(item: pytest.Item, turn: int) -> bool:
    module = item.getparent(pytest.Module)
    whole = module is not None and any(mark.name == "grid" for mark in module.own_markers)
    return zlib.crc32((item.location[0] if whole else _key(item, "grid")).encode()) % TURNS == turn % TURNS


def _key(item: pytest.Item, name: str) -> str:
    """The argument of a mark, which several tests have, or the test's own name."""
    mark = item.get_closest_marker(name)
    return str(mark.args[0] if mark is not None and mark.args else item.nodeid)
