"""The helpers of this folder import each other by name, whatever pytest's import mode."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def qcore_alone():
    """The pages show what qcore prints without plugins, whichever are installed where they are tested."""
    from qcore.plugins import registry

    for name, entry in list(registry.entries().items()):
        if entry.dist != "qcore":
            registry.remove(name)
