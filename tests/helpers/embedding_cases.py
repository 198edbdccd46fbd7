"""What the plugins that gather in Triton are tested with: their cases, and a process in which Triton compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from qcore.contracts import EMBEDDING
from qcore.weights.schemes import Scheme

SCHEMES = [
    "w4a16", "w4a16-asym", "w4a16-fzp", "w4a16-g32", "w4a16-g64-asym", "w4a16-g96-fzp", "w4a16-g128-asym",
    "w8a16", "w8a16-asym", "w8a16-fzp", "w8a16-g32", "w8a16-g64-asym", "w8a16-g96-fzp",
]  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cases():
    """The contract's cases; every scheme meets every shape, in one of the dtypes."""
    found = list(EMBEDDING.cases(map(Scheme.parse, SCHEMES), DTYPES))
    return [case for i, case in enumerate(found) if i % 3 == i * len(SCHEMES) // len(found) % 3]


def told_by(code):
    """The lines of JSON that ``code`` prints, run by itself where Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]
