"""Khronos' validation layer has nothing to say about what the plugin does for qcore."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCHEMES = ("w8a16", "w4a16-g32-fzp", "w4a16-g128-asym", "w8a8", "w8a8-aasym", "w4a8-g32-asym", "w8a8-static-o8")
FEW = ("w8a16", "w4a16-g128-asym", "w8a8-aasym", "w4a8-g32-asym")
CASES = ("rows-17", "rows-1]", "k-ragged", "n-129", "bias-ragged", "3x3", "depthwise", "batched", "many")

CODE = """
import contextlib, io, sys, torch, qcore, qcore_vulkan
from qcore.cli import main
from qcore_vulkan import device

schemes, cases = (text.split() for text in sys.argv[1:3])
if sys.argv[3] != "own":  # the kernels for GPUs run on lavapipe as well, but for those on matrix units
    opened = device.get()
    opened.profile = sys.argv[3]
chosen = [word for name in schemes for word in ("--scheme", name)] + [word for c in cases for word in ("--select", c)]
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    code = main(["conformance", "vulkan", "--jobs", "0", *chosen])
print(printed.getvalue().splitlines()[-1], code)

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.GELU(), torch.nn.Conv2d(8, 4, 2), torch.nn.Flatten(), torch.nn.Linear(4, 5)
)
with torch.no_grad(), qcore.using("vulkan"):
    qcore.quantize_(model, "w8a8")
    qcore_vulkan.sequential(model)(torch.randn(2, 3, 4, 4))
stats = device.get().stats()
print(stats.submissions > 100, stats.messages)
"""


@pytest.mark.parametrize(("profile", "schemes"), [("own", SCHEMES), ("gpu", FEW)])
def test_the_validation_layer_is_silent(tmp_path, profile, schemes):
    env = {**os.environ, "QCORE_VULKAN_VALIDATE": "1", "QCORE_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", CODE, " ".join(schemes), " ".join(CASES), profile]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env, check=False)
    assert not done.returncode, done.stderr[-3000:]
    summary, silence = done.stdout.splitlines()[-2:]
    assert " 0 failed" in summary, done.stdout
    assert summary.endswith(" 0")
    assert silence == "True 0", done.stderr[-3000:]
    assert "qcore-vulkan:" not in done.stderr
