"""Random convolutions in processes of their own: kernels, strides, padding, dilation, groups, images down to a pixel.

The first run in `nox -s tests`, the others in `nox -s grids`; QCORE_FUZZ=N draws N of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import conv2d_fuzzing
import pytest
from grids import draws

import qcore

SEED = 14


def run(start, stop):
    """Run some convolutions in a process; returns where to go on, and what was wrong."""
    source = str(Path(qcore.__file__).parents[1])
    command = [sys.executable, conv2d_fuzzing.__file__, *map(str, (SEED, start, stop))]
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if line.startswith("WRONG")]
    last = max((int(line) for line in lines if line.isdigit()), default=start)
    if done.returncode:
        wrong.append(f"number {last} ended its process ({done.returncode}): {done.stderr[-300:]}")
    return last + 1, wrong


@pytest.mark.parametrize("numbers", draws(300, few=50))
def test_random_convolutions(numbers):
    place, stop, wrong = numbers.start, numbers.stop, []
    while place < stop:
        place, found = run(place, stop)
        wrong += found
    assert not wrong, "\n".join(wrong[:20])
