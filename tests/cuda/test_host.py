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

TARGETS = ("sm_90", "sm_80", "gfx942")
CONTRACTS = ("linear", "conv2d", "embedding")


@pytest.fixture(scope="module")
def faults():
    asked = [{"target": target, "contract": contract} for target in TARGETS for contract in CONTRACTS]
    found = in_processes(f"{Path(__file__).parent / 'launches.py'}:dry_run", asked)
    return {(one["target"], one["contract"]): answer for one, answer in zip(asked, found, strict=True)}


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_case_comes_to_its_launches(faults, target, contract):
    assert faults[target, contract] == []
