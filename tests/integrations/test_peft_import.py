"""peft meets quantized layers without ``import qcore.adapters``."""

import subprocess
import sys

import pytest

pytest.importorskip("peft")

PROGRAM = """
import peft, torch, qcore
{broken}
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
print(len(qcore.quantize_(model, "w8a16").by_state("quantized")), "layers")
adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
print(type(adapted.base_model.model[0]).__module__)
"""


def run(broken):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM.format(broken=broken)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_all_linear_finds_quantized_layers():
    done = run("")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "qcore.adapters.layers"


@pytest.mark.parametrize("broken", [
    "del peft.tuners.tuners_utils._maybe_include_all_linear_layers", "import sys; sys.modules['qcore.adapters'] = None",
])  # fmt: skip
def test_another_version_of_peft_does_not_break_quantize(broken):
    done = run(broken)
    assert done.stdout == "2 layers\n"
    assert "get_peft_model" in done.stderr
