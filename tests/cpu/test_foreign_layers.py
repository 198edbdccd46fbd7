"""Layers of other tools' checkpoints through this plugin: the same results as by torch ops."""

import pytest
from foreign_layers import FOLDER, check_runs_on

LEFT_OUT = ("gguf_", "gptoss_", "hqq_4_axis0", "bnb_int8", "quanto_qint2", "quanto_qint4")
"""Blocks without a model, experts, and what cannot be represented."""
CASES = sorted(path.stem for path in FOLDER.glob("*.safetensors") if not path.stem.startswith(LEFT_OUT))
FP8_ACTIVATIONS = {"ao_fp8_dyn_row", "ao_fp8_dyn_tensor", "ao_int4_fp8", "ct_fp8_block", "ct_fp8_dyn", "ct_fp8_static"}
FP8_ACTIVATIONS |= {"ct_mxfp8", "fp8_block_ragged"}


@pytest.mark.filterwarnings("ignore::qcore.QcoreWarning")
@pytest.mark.parametrize("case", CASES)
def test_by_the_plugin_or_torch(case):
    assert check_runs_on("cpu", case).plugin == ("torch" if case in FP8_ACTIVATIONS else "cpu")
