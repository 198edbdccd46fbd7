"""The processor's model, and whether the library can be used, for `qcore doctor` and the keys of verdicts."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from qcore import Available, Unavailable

from . import __version__, native


def processor() -> str:
    """The model of the processor, or its architecture if the system does not report a model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def probe() -> Available | Unavailable:
    """The result of `qcore_probe`."""
    if reason := native.fault():
        return Unavailable(reason, broken=True)
    isa = native.isa()
    details = {"isa": f"{isa} of {' '.join(native.isas())}", "threads": torch.get_num_threads()}
    return Available(processor(), f"qcore-cpu {__version__}, {isa}, torch {torch.__version__}", details)
