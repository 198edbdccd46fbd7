"""The plugin's host code gets through every case of the conformance kit, for every kind of GPU: no launch is made.

What it would not get through on a machine with a GPU (a descriptor that Triton refuses, a size that nobody thought of)
shows here, without one.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

from workers import in_processes

ASKED = (("sm_90", "linear"), ("sm_90", "conv2d"), ("sm_90", "embedding"), ("sm_80", "linear"), ("gfx942", "linear"))


@pytest.fixture(scope="module")
def faults():
    asked = [{"target": target, "contract": contract} for target, contract in ASKED]
    return dict(zip(ASKED, in_processes(f"{Path(__file__).parent / 'launches.py'}:dry_run", asked), strict=True))


@pytest.mark.parametrize(("target", "contract"), ASKED)
def test_every_case_comes_to_its_launches(faults, target, contract):
    assert faults[target, contract] == []
