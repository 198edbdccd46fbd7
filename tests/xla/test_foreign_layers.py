"""Layers of other tools' checkpoints through this plugin: the same results as through torch ops."""

import pytest
from foreign_layers import ONE_OF_EACH, check_runs_on


@pytest.mark.parametrize("case", sorted(ONE_OF_EACH))
def test_by_the_plugin(case):
    assert check_runs_on("xla", case).plugin == "xla"
