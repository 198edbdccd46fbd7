"""Layers of other tools' checkpoints through this plugin, or with its refusal through torch ops: the same results."""

import pytest
from foreign_layers import ONE_OF_EACH, check_runs_on

REFUSED = {"fp8_block_ragged"}


@pytest.mark.parametrize("case", sorted(ONE_OF_EACH))
def test_by_the_plugin_or_torch(case):
    assert check_runs_on("vulkan", case).plugin == ("torch" if case in REFUSED else "vulkan")
