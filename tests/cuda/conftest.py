"""No GPU is needed here: kernels run in Triton's interpreter, which has to be chosen before Triton is imported.

What needs Triton's compiler runs in a process of its own.
"""

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
    # `pytest tests/cuda` chooses it in time; another start may have imported Triton before this file.
    assert triton.knobs.runtime.interpret, "triton was imported without TRITON_INTERPRET=1; run pytest tests/cuda"
    return triton


@pytest.fixture
def kernel(monkeypatch):
    """A kernel that is launched the quick way, see `fake_triton`."""
    import torch
    from fake_triton import Kernel

    from qcore_cuda import launch, replay

    made = Kernel()
    monkeypatch.setattr(launch, "_quick", lambda: True)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: 77, raising=False)
    monkeypatch.setattr(replay, "_device", lambda: made.device)
    monkeypatch.setattr(replay, "_current", lambda _index: made.stream)
    monkeypatch.setattr(replay, "_kinds", {})
    return made
