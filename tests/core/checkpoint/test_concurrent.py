"""One directory, several savers and readers, and savers that die: what loads is the old state or the new one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from grids import sampled

_SCRIPT = Path(__file__).with_name("crashing.py")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks")


def counts(*arguments: object) -> dict[str, int]:
    """What the script counts; it fails if it finds a state that is neither old nor new."""
    command = [sys.executable, _SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_a_save_that_dies_leaves_the_old_state_or_the_new_one(tmp_path):
    steps = counts(tmp_path, "steps")
    assert len(steps) == 13
    assert steps["shards to shards"] > 20
    assert min(steps.values()) > 4


@pytest.mark.parametrize("savers", sampled(["two savers", "one saver"], 1))
def test_readers_see_whole_states_while_savers_are_killed(tmp_path, savers):
    found = counts(tmp_path, savers, 3)
    assert found["loads"] > 30
    assert found["kills"] > 10
    assert found["values"] > 1
