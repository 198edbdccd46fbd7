"""Khronos' validation layer has nothing to say about whole models, the synchronization of their steps included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HELPERS = Path(__file__).parents[1] / "helpers"

CODE = """
import torch, qcore
from torch import nn
from tiny_models import Decoder, Encoder
from qcore_vulkan import device
from qcore_vulkan.graphs.backend import qcore_vulkan

torch.manual_seed(0)
ids = torch.randint(0, 96, (1, 5))
pictures = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8),
    nn.MaxPool2d(2), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(1),
)

def orders(x, i):
    values, places = x.sort(-1)
    y = x.scatter_add(1, i, values).flip(0).index_add(0, i[0], x)
    return y.scatter(1, places, 2.0).index_put((y > 1,), y[0, 0]), x.view(-1).repeat(100).argsort()

with torch.no_grad():
    for scheme in (None, "w8a8"):
        models = (Decoder(bias=True, layers=1).eval(), Encoder(layers=1).eval())
        calls = (lambda m: m(ids, torch.arange(5)), lambda m: m(ids, torch.ones_like(ids)))
        for model, call in zip(models, calls):
            if scheme:
                qcore.quantize_(model, scheme)
            call(torch.compile(model, backend=qcore_vulkan))
    for scheme in (None, "w8a8"):
        if scheme:
            qcore.quantize_(pictures.eval(), scheme)
        torch.compile(pictures.eval(), backend=qcore_vulkan)(torch.randn(2, 3, 8, 8))
    torch.compile(orders, backend=qcore_vulkan)(torch.randn(6, 6), torch.randint(0, 6, (6, 6)))
    device.get().profile = "gpu"
    for scheme in ("w4a16-g32", "w8a8"):  # what a token's products compute around them, and attention over many keys
        model = Decoder(bias=True, layers=2, length=200).eval()
        qcore.quantize_(model, scheme)
        torch.compile(model, backend=qcore_vulkan)(ids[:, :1], torch.arange(1))
found = qcore.graphs.explain()
print(len(found.reports), len(found.host), len(found.refused), device.get().stats().messages)
"""


def test_the_validation_layer_is_silent_about_whole_models(tmp_path):
    # The layer's checks of synchronization find what a missing barrier would leave to chance.
    enabled = "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT"
    env = {
        **os.environ, "QCORE_VULKAN_VALIDATE": "1", "QCORE_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HELPERS),
        "VK_LAYER_ENABLES": enabled,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=900, env=env, check=False
    )
    assert not done.returncode, done.stderr[-3000:]
    assert done.stdout.split() == ["9", "0", "0", "0"], done.stderr[-3000:]
    assert "qcore-vulkan:" not in done.stderr
