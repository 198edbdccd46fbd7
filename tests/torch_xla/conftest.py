"""Tests on XLA tensors of torch_xla, which has an environment, and so a folder and a session, of its own."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from qcore import resolver

if importlib.util.find_spec("torch_xla") is None:
    collect_ignore_glob = ["*"]
else:
    os.environ.setdefault("PJRT_DEVICE", "CPU")


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path_factory):
    """No settings from outside, a cache of the session's own, and nothing held against a kernel that failed before."""
    for name in [name for name in os.environ if name.startswith("QCORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("QCORE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
    torch.manual_seed(0)
    yield
    resolver.forget()


@pytest.fixture(scope="session")
def device():
    import torch_xla

    return torch_xla.device()
