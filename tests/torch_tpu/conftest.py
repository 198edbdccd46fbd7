"""Tests with torch_tpu and without a TPU: the device is named, and tensors on it are fake. A real op would abort."""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("torch_tpu") is None:
    collect_ignore_glob = ["*"]
else:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    os.environ["JAX_PLATFORMS"] = "cpu"


@pytest.fixture(scope="session")
def device():
    """The device ``tpu``. Private, and for tests only: on a TPU host torch_tpu does this when torch is imported."""
    from torch_tpu import _loader

    return _loader._init_device("tpu")
