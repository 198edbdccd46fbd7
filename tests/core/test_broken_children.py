"""Plugins that end the process or hang: they are named, and the next process does without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import broken_children
import pytest
from broken_plugins import STAGES
from grids import sampled

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="each plugin is met in a forked process")

_PAIRS = [
    f"{mode}:{stage}" for mode in broken_children.MODES for stage in STAGES if (mode, stage) != ("hang", "probe")
]  # a probe that hangs is given up on after ten seconds, and tested elsewhere
_NEEDED = [f"{mode}:{stage}" for mode in ("exit", "hang") for stage in ("import", "offer", "pack", "call")]
_NEEDED.append("terminated:pack")


_OTHERS = [pair for pair in _PAIRS if pair not in _NEEDED]


@pytest.fixture(scope="module")
def met(tmp_path_factory, request):
    """What became of the two processes that met each plugin."""
    asked = {item.callspec.params["pair"] for item in request.session.items if item.path == request.path}
    command = [sys.executable, broken_children.__file__, str(tmp_path_factory.mktemp("met")), *sorted(asked)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("QCORE_")}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(broken_children.__file__).parent), env.get("PYTHONPATH", "")])
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=600)
    return json.loads(done.stdout)


@pytest.mark.parametrize("pair", [*_NEEDED, *sampled(_OTHERS, 8)])
def test_the_next_process_skips_a_plugin_that_ended_or_hung_one(met, pair):
    mode, _, stage = pair.partition(":")
    first, second = met[pair]
    if mode == "hang":
        assert first["interrupted"], first
        assert len(first["told"]) == 1
        assert "has spent over 0.3 seconds in" in first["told"][0]
    assert first["code"] != 0, first
    if mode not in broken_children.BLAMED:
        # Anybody may send that signal at any moment: the plugin is tried again.
        assert (second["code"], second["told"]) == (first["code"], [])
        return
    assert (second["code"], second.get("right")) == (0, True), second
    assert second["plugin"] == ("broken" if stage == "observer" else "healthy")
    assert len(second["told"]) == 1
    assert "earlier process" in second["told"][0]
