"""Tests on XLA tensors of torch_xla, which has an environment, and so a folder and a session, of its own."""

from __future__ import annotations

import importlib.util
import os

import isolation
import pytest
import torch

if importlib.util.find_spec("torch_xla") is None:
    collect_ignore_glob = ["*"]
else:
    os.environ.setdefault("PJRT_DEVICE", "CPU")


@pytest.fixture(autouse=True)
def isolated(tmp_path_factory):
    """No settings from outside, and a cache of the session's own."""
    torch.manual_seed(0)
    with isolation.isolated(tmp_path_factory.getbasetemp() / "cache"):
        yield


@pytest.fixture(scope="session")
def device():
    import torch_xla

    return torch_xla.device()
