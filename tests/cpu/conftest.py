"""Tests run on every instruction set that this processor has; in CI that is AVX-512, AVX2 and portable code."""

from __future__ import annotations

import importlib.util

import isolation
import pytest

if importlib.util.find_spec("qcore_cpu") is None:  # it could not be built here: nox has said why
    collect_ignore_glob = ["*"]


@pytest.fixture(autouse=True)
def isolated(tmp_path_factory):
    """No settings from outside, and a cache of the session's own."""
    with isolation.isolated(tmp_path_factory.getbasetemp() / "cache"):
        yield
