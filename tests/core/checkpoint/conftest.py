"""What the tests of checkpoints share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def nothing_left(tmp_path: Path):
    """A check that no temporary file is left anywhere."""

    def check() -> None:
        assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]

    return check
