"""Tests inside vLLM for CPUs, which has an environment, and so a folder and a session, of its own: `nox -s vllm`."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import sys
from pathlib import Path

import isolation
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # models.py and serving.py
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*"]
else:
    import serving

    os.environ.update(serving.SETTINGS, VLLM_ENABLE_V1_MULTIPROCESSING="0")


@pytest.fixture(autouse=True, scope="session")
def isolated(tmp_path_factory):
    """No settings from outside, and a cache of the session's own, which processes of ranks share."""
    with isolation.isolated(tmp_path_factory.getbasetemp() / "cache"):
        yield


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """``made(name)``: the folder and the reference tokens of a model of models.py, made once."""
    import models

    found = {}

    def make(name):
        if name not in found:
            folder = tmp_path_factory.mktemp(name) / "model"
            found[name] = folder, models.MODELS[name](folder)
        return found[name]

    return make


@pytest.fixture
def log():
    """The messages of qcore in vLLM's log. caplog gets none: vLLM's loggers do not pass records on."""
    messages = []

    def note(record):
        messages.append(record.getMessage())
        return True

    logger = logging.getLogger("vllm.qcore")
    logger.addFilter(note)  # vLLM configures its loggers when the first engine starts, which drops handlers
    yield messages
    logger.removeFilter(note)


@pytest.fixture
def engine():
    """``engine(folder, **options)``: vLLM in this process, one rank; shut down after the test."""
    started = []

    def start(folder, **options):
        llm = serving.start(folder, **options)
        started.append(llm)
        return llm

    yield start
    for llm in started:
        llm.llm_engine.engine_core.shutdown()
    started.clear()
    gc.collect()
    # One that failed to start has left its groups of ranks, which the next one would take for its own.
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
