"""Several devices, which XLA simulates on the CPU in processes of their own: the same results as on one."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from grids import sampled
from jax.sharding import Mesh
from tiny_models import Decoder
from torch import nn

import qcore
import qcore_xla
from qcore_xla.graphs import meshes
from qcore_xla.graphs.meshes import MeshCut

HELPERS = Path(__file__).parents[1] / "helpers"


def run(script, *arguments, devices):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HELPERS / script), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal", str(devices)]


@pytest.mark.alternate
@pytest.mark.parametrize(
    ("scheme", "devices"), sampled([("w4a16-g32", 4), ("wfp8afp8", 4), ("nvfp4", 4), ("w8a8", 8)], 2)
)
def test_a_decoder_on_a_mesh(scheme, devices):
    run("xla_mesh.py", scheme, devices, devices=devices)


@pytest.mark.alternate
def test_scales_of_each_devices_own_features():
    run("xla_mesh.py", "w8a8", 4, "local", devices=4)


@pytest.mark.alternate
def test_arrays_on_a_mesh():
    run("xla_mesh_arrays.py", 4, devices=4)


@pytest.mark.alternate
def test_arrays_on_an_explicit_mesh():
    run("xla_mesh_explicit.py", 4, devices=4)


def test_states_on_a_mesh():
    run("xla_mesh_states.py", 2, devices=2)


def here():
    return Mesh(jax.devices()[:1], ("model",))


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4-g64-asym"])
def test_parts_have_the_values_of_the_whole(scheme, kind):
    cut = MeshCut(kind, here(), "model")
    object.__setattr__(cut, "mesh", type("Four", (), {"shape": {"model": 4}})())
    weight = qcore.quantize(torch.randn(16, 192), scheme)
    assert not cut.why_not(16, 192, weight.format.group_size)
    parts = [part.dequantize(torch.float32) for part in cut.parts(weight)]
    assert torch.equal(torch.cat(parts, 0 if kind == "column" else 1), weight.dequantize(torch.float32))


def test_what_stays_whole():
    model = nn.Sequential(nn.Linear(32, 6), nn.Linear(6, 32))
    qcore.quantize_(model, "w8a16")
    two = Mesh(jax.devices()[:1], ("model",))
    with pytest.raises(qcore.UnsupportedError, match="no layer of the model"):
        qcore_xla.shard_(model, two)
    with pytest.raises(qcore.UnsupportedError, match="'column' or 'row', not 'vocab'"):
        qcore_xla.shard_(model, two, plan={"0": "vocab"})
    with pytest.raises(qcore.UnsupportedError, match="which axis"):
        qcore_xla.shard_(model, two, axis="data")
    with pytest.raises(qcore.UnsupportedError, match="'global' or 'local'"):
        qcore_xla.shard_(model, two, scales="mine")
    assert qcore_xla.shard_(model, two, plan={"0": "column", "1": "row"}) == {"0": "column", "1": "row"}


def test_groups_of_activations_are_not_divided():
    layer = nn.Sequential(nn.Linear(192, 6))
    qcore.quantize_(layer, "wfp8afp8-g64")
    activation, two = layer[0].scheme.activation, type("Two", (), {"shape": {"model": 2}})()
    cuts = {scales: MeshCut("row", two, "model", scales) for scales in ("global", "local")}
    assert "groups of 64 activations" in cuts["global"].why_not_activation(activation, 192)
    assert not cuts["local"].why_not_activation(activation, 192)
    assert not cuts["global"].why_not_activation(activation, 256)
    assert not MeshCut("column", two, "model").why_not_activation(activation, 192)
    assert not cuts["global"].why_not_activation(None, 192)
    three = SimpleNamespace(shape={"model": 2}, devices=np.array(jax.devices()[:1]), axis_names=("model",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "axis_of", lambda *_: (three, "model"))
        with pytest.warns(qcore.QcoreWarning, match="scales='local' allows"), pytest.raises(qcore.UnsupportedError):
            qcore_xla.shard_(layer, here(), plan={"0": "row"})
        assert qcore_xla.shard_(layer, here(), plan={"0": "row"}, scales="local") == {"0": "row"}


def test_heads_are_cut_by_the_plan_of_core():
    model = Decoder(layers=1).eval()
    qcore.quantize_(model, "w8a16")
    found = qcore_xla.shard_(model, here())
    kinds = {name.rpartition(".")[2]: kind for name, kind in found.items()}
    assert kinds == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "column"),
        **dict.fromkeys(("o_proj", "down_proj"), "row"),
    }


def test_weights_that_cannot_be_cut():
    weight = qcore.quantize(torch.randn(6, 64), "int8")
    with pytest.raises(qcore.FormatError, match="over a mesh"):
        qcore_xla.pack(weight, cut="row")
    with pytest.raises(qcore.FormatError, match="has no parts"):
        qcore_xla.pack(weight).part  # noqa: B018
    cut = MeshCut("row", type("Four", (), {"shape": {"model": 4}})(), "model")
    assert "no multiple of 4" in cut.why_not(6, 66, None)
    assert "have an order" in cut.why_not(6, 64, 32, order=True)
    assert "groups of 2" in cut.why_not(6, 72, 4)


def test_the_device_of_torch_in_a_mesh():
    gpus = [SimpleNamespace(local_hardware_id=number, platform="gpu") for number in (1, 0)]
    cut = SimpleNamespace(mesh=SimpleNamespace(devices=np.array(gpus)), axis="model")
    found = [meshes.Placement({"layer": cut}, torch.device("cuda", i)).here for i in range(3)]
    assert found == [gpus[1], gpus[0], None]
    assert meshes.Placement({"layer": cut}, torch.device("cpu")).here is None
    assert meshes.Placement({"layer": cut}).here is None
    assert meshes.Placement({}, torch.device("cpu")).here is None
    assert meshes.Placement({"layer": MeshCut("row", here(), "model")}, torch.device("cpu")).here is jax.devices()[0]
