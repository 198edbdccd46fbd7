"""Layers of other tools' checkpoints through this plugin, or with its refusal through torch ops: the same results."""

import pytest
from foreign_layers import check_runs_on

SERVED = ("gptq_4_sym_v1_g128", "gptq_4_asym_v1_desc", "gptq_8_asym_g64", "gptq_8_sym_channel")


@pytest.mark.parametrize("case", SERVED)
def test_by_the_plugin(case):
    assert check_runs_on("xla", case).plugin == "xla"
