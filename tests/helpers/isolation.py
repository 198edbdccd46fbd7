"""What keeps one test from deciding another, shared by the folders' fixtures `isolated`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qcore.resolving import resolver


@contextmanager
def isolated(cache: Path) -> Iterator[pytest.MonkeyPatch]:
    """No settings from outside and a cache of its own; nothing is held afterwards against a kernel that failed.

    Gives a MonkeyPatch that nobody else undoes: a test may undo the fixture's of that name before it ends.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("QCORE_")]:
            patch.delenv(name)
        patch.setenv("QCORE_CACHE_DIR", str(cache))
        yield patch
        resolver.forget()
