"""Memory stays flat while qcore is used in ever new ways. ``QCORE_SOAK`` says for how many seconds in all."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from activities import ACTIVITIES

SECONDS = float(os.environ.get("QCORE_SOAK", "60"))
ALLOWED = 6 << 20
"""Bytes of growth between the middle and the end: what the allocator keeps varies by about half of this."""


@pytest.mark.parametrize("name", [activity.__name__ for activity in ACTIVITIES])
def test_memory_stays_flat(name):
    script = Path(__file__).with_name("activities.py")
    command = [sys.executable, str(script), name, str(SECONDS / len(ACTIVITIES))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    middle, end = found[len(found) // 2 :][:10], found[-10:]
    growth = statistics.median(end) - statistics.median(middle)
    first, last, grown = (value / 2**20 for value in (found[0], found[-1], growth))
    print(f"{name}: {first:.0f} MiB at first, {last:.0f} at last, {grown:+.1f} since half")
    assert growth < ALLOWED, [round(value / 2**20, 1) for value in found]
