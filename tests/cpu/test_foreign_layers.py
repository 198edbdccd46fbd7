"""Layers of other tools' checkpoints through this plugin: the same results as by torch ops."""

import pytest
from foreign_layers import FOLDER, check_runs_on

LEFT_OUT = ("gguf_", "gptoss_", "hqq_4_axis0", "bnb_int8", "quanto_qint2", "quanto_qint4")
"""Blocks without a model, experts, and what cannot be represented."""
CASES = sorted(path.stem for path in FOLDER.glob("*.safetensors") if not path.stem.startswith(LEFT_OUT))


@pytest.mark.filterwarnings("ignore::qcore.QcoreWarning")
@pytest.mark.parametrize("case", CASES)
def test_by_the_plugin(case):
    assert check_runs_on("cpu", case).plugin == "cpu"
