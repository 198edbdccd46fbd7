"""The plugin's host code prepares every launch of the conformance kit, for every kind of GPU, and launches none.

A descriptor that Triton refuses, or an unforeseen size, shows here without a GPU.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

from grids import sampled
from workers import in_processes

ASKED = (("sm_90", "linear"), ("sm_90", "conv2d"), ("sm_90", "embedding"), ("sm_80", "linear"), ("gfx942", "linear"))
ASKED += (("sm_90", "grouped_linear"), ("gfx942", "grouped_linear"))

LAUNCHES = Path(__file__).parent / "launches.py"


@pytest.mark.parametrize(("target", "contract"), sampled(ASKED, 2))
def test_every_case_reaches_its_launches(target, contract):
    (faults,) = in_processes(f"{LAUNCHES}:dry_run", [{"target": target, "contract": contract}])
    assert faults == []
