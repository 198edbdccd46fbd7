"""The models of `zoo`, which test files cannot import by name: pytest loads each by path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def zoo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checkpoint_zoo", Path(__file__).with_name("zoo.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def nothing_left(tmp_path: Path):
    """A check that no temporary file is left anywhere."""

    def check() -> None:
        assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]

    return check
