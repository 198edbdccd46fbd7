"""What all tests share: a fixture, and the turns of the session `grids`.

With the variable GRID_TURN=N `grids` runs a fifth of its tests, that of N modulo 5.
"""

from __future__ import annotations

import os
import zlib

import pytest

TURNS = 5


@pytest.fixture
def fresh_compiler():
    """torch.compile has compiled nothing yet, and nothing of the test stays."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turn = os.environ.get("GRID_TURN")
    if not turn:
        return
    left_out = {item for item in items if item.get_closest_marker("grid") and not _in_turn(item, int(turn))}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


def _in_turn(item: pytest.Item, turn: int) -> bool:
    module = item.getparent(pytest.Module)
    whole = module is not None and any(mark.name == "grid" for mark in module.own_markers)
    key = item.location[0] if whole else item.nodeid  # the tests of a whole module share what it prepares
    return zlib.crc32(key.encode()) % TURNS == turn % TURNS
