"""No GPU is needed here: kernels run in Triton's interpreter, which has to be chosen before Triton is imported.

What needs Triton's compiler runs in a process of its own.
"""

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
def kernel(monkeypatch):
    """A kernel that is launched the quick way, see `fake_triton`."""
    import torch
    from fake_triton import Kernel

    from qcore_cuda.runtime import launch, replay

    made = Kernel()
    monkeypatch.setattr(launch, "_quick", lambda: True)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: 77, raising=False)
    monkeypatch.setattr(replay, "_device", lambda: made.device)
    monkeypatch.setattr(replay, "_current", lambda _index: made.stream)
    monkeypatch.setattr(replay, "_kinds", {})
    return made
