"""Two devices side by side. Where there is one, a copy of lavapipe's library makes a second."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MANIFESTS = sorted(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))

CODE = """
import torch, qcore, qcore_vulkan
from qcore.nn import QuantizedLinear
from qcore_vulkan import device, native
from qcore_vulkan.weights import find

def layer(which, k=64, n=64):
    torch.manual_seed(0)
    with qcore_vulkan.on_device(which), qcore.using("vulkan"):
        return QuantizedLinear.from_float(torch.nn.Linear(k, n).requires_grad_(False), "w8a8")

x, layers = torch.randn(3, 64), [layer(0), layer(1)]
where = [find(one._primary.packed["weight"]).device for one in layers]
assert [one.description.index for one in where] == [0, 1], where
first, second = (one(x) for one in layers)
assert torch.equal(first, second)
assert all(one.stats().submissions for one in where)

chain = qcore_vulkan.sequential(layers[0], torch.nn.ReLU(), layers[1], layers[1])
torch.testing.assert_close(chain(x), torch.nn.Sequential(*chain)(x))
assert [step.submission for step in chain.explain()] == [1, 1, 2, 2], str(chain.explain())

where[0].check(where[0].library.qv_inject(where[0].handle, native.INJECT_LOST))
try:
    layers[0](x)
except qcore.errors.PluginError:
    pass
else:
    raise AssertionError("the first device was not lost")
assert torch.equal(layers[1](x), second)
assert torch.equal(layer(0)(x), second)
print("both serve")
"""


@pytest.fixture
def two_devices(tmp_path):
    """An environment in which Vulkan has two devices."""
    if not MANIFESTS:
        pytest.skip("lavapipe is not installed")
    manifest = json.loads(MANIFESTS[0].read_text("utf-8"))
    library = _found(manifest["ICD"]["library_path"])
    copied = tmp_path / "libvulkan_lvp_again.so"
    shutil.copy(library, copied)
    manifest["ICD"]["library_path"] = str(copied)
    second = tmp_path / "second.json"
    second.write_text(json.dumps(manifest), "utf-8")
    paths = f"{MANIFESTS[0]}{os.pathsep}{second}"
    return {**os.environ, "VK_ICD_FILENAMES": paths, "VK_DRIVER_FILES": paths}


def _found(library):
    if Path(library).is_absolute():
        return library
    listing = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    return next(line.split()[-1] for line in listing.splitlines() if library in line)


def run(code, env):
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def test_weights_stay_on_the_device_they_were_packed_for(two_devices):
    assert run(CODE, two_devices).strip() == "both serve"


def test_a_variable_names_the_device(two_devices):
    code = (
        "from qcore_vulkan import device, probe\n"
        "print(device.get().description.index, probe.probe().details['devices'])"
    )
    out = run(code, {**two_devices, "QCORE_VULKAN_DEVICE": "1"})
    assert out.startswith("1 0: llvmpipe")
    assert ", 1: llvmpipe" in out
