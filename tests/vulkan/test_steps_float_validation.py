"""Khronos' validation layer has nothing to say about the float steps, of CPUs and of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys, torch
from float_steps import run
from qcore_vulkan import device
from qcore_vulkan.steps import attention, codes, float_convolution, gather, norms, pointwise, pooling, products
from qcore_vulkan.steps import reductions, rope, sorting
from qcore_vulkan.steps.convolution import Geometry2d
import qcore

opened = device.get()
opened.profile = sys.argv[1]
x, q = torch.randn(4, 70), torch.randn(1, 4, 12, 16)
seen = torch.ones(12, 12, dtype=torch.bool)
index = torch.tensor([3, 0, 1])
for step, *args in (
    (pointwise.unary, "silu", x), (pointwise.binary, "mul", x, x[0]), (pointwise.where, x > 0, x, 0.0),
    (pointwise.convert, x.t(), torch.int32), (gather.gather, x, 0, index), (gather.take_along, x, 1, index.view(3, 1)),
    (norms.rms_norm, x, x[0], 1e-5), (norms.add_layer_norm, x, x, None, None, 1e-5), (norms.softmax, x),
    (rope.rope, q, q[0, 0], q[0, 1]), (attention.attention, q, q[:, :2], q[:, :2], seen, False, None),
    (attention.attention, q[:, :, :1], q, q, None, False, None), (products.dense, x, x[:, :70], x[0, :4]),
    (products.dense, torch.randn(20, 70), x.half(), None), (products.matmul, q, q.transpose(2, 3)),
    (reductions.reduce, "sum", x, [1]), (reductions.reduce, "amax", x, [0]), (reductions.argreduce, "argmin", x, 1),
    (reductions.cumsum, x, 0), (reductions.topk, x, 3), (sorting.sort, x), (sorting.sort, torch.randn(2, 5000), True),
    (float_convolution.convolution, q, torch.ones(6, 2, 3, 3), x[0, :6], Geometry2d((3, 3), (2, 1), (1, 1), (1, 1), 2)),
    (pooling.mean_pool, q, None, (5, 3)), (codes.encode, x, qcore.OutputInt8(0.1, 3)),
):
    run(opened, step, *args)
stats = opened.stats()
print(stats.submissions >= 25, stats.messages)
"""


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_the_validation_layer_is_silent(tmp_path, profile):
    helpers = str(Path(__file__).parents[1] / "helpers")
    env = {**os.environ, "QCORE_VULKAN_VALIDATE": "1", "QCORE_CACHE_DIR": str(tmp_path), "PYTHONPATH": helpers}
    command = [sys.executable, "-c", CODE, profile]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env, check=False)
    assert not done.returncode, done.stderr[-3000:]
    assert done.stdout.split() == ["True", "0"], done.stderr[-3000:]
    assert "qcore-vulkan:" not in done.stderr
