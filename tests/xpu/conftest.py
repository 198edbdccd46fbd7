"""No GPU is needed here: kernels run in Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import sys

import isolation
import pytest

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def isolated(tmp_path):
    """No settings from outside, and a cache of its own."""
    with isolation.isolated(tmp_path / "cache"):
        yield


@pytest.fixture(scope="session")
def interpreter():
    """Triton's interpreter; a test that launches kernels asks for it."""
    triton = pytest.importorskip("triton")
    # `pytest tests/xpu` chooses it in time; another start may have imported Triton before this file.
    assert triton.knobs.runtime.interpret, "triton was imported without TRITON_INTERPRET=1; run pytest tests/xpu"
    return triton


@pytest.fixture
def stand_in():
    """Stand-ins for the device's ops, which remember how they were called; a test that calls kernels asks for it."""
    import qcore_xpu_stand_in
    from qcore_xpu_stand_in.replacing import replace_device

    replace_device()
    qcore_xpu_stand_in.forget()
    return qcore_xpu_stand_in
