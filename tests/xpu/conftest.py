"""No GPU is needed here: kernels run in Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import isolation
import pytest
from interpreting import interpreter  # noqa: F401 - a fixture, and the choice of it


@pytest.fixture(autouse=True)
def isolated(tmp_path):
    """No settings from outside, and a cache of its own."""
    with isolation.isolated(tmp_path / "cache"):
        yield


@pytest.fixture
def stand_in():
    """Stand-ins for the device's ops, which remember how they were called; a test that calls kernels asks for it."""
    import qcore_xpu_stand_in
    from qcore_xpu_stand_in.replacing import replace_device

    replace_device()
    qcore_xpu_stand_in.forget()
    return qcore_xpu_stand_in


@pytest.fixture
def by_torch(monkeypatch):
    """Activations quantized by torch ops, with the same numbers: Triton's interpreter is a hundred times slower."""
    from qcore_xpu import quantizing

    monkeypatch.setattr(quantizing, "why_not_triton", lambda: "for the test")
