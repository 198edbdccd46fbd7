"""What JAX would do in a process, told without importing it; and the answers of the probe and of eligibility."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import qcore
from qcore.contracts import CONTRACTS
from qcore_xla import eligibility, environment, plugin, probe
from qcore_xla.engines import base

HOOKS = {"linear": plugin.qcore_linear, "conv2d": plugin.qcore_conv2d, "embedding": plugin.qcore_embedding}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of our making, in a process that has not used JAX yet."""
    for name in (environment.PLATFORMS, environment.PREALLOCATE, *environment.FRACTIONS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "initialised", lambda: False)
    monkeypatch.setattr(environment, "gpu_plugin", lambda: "")
    monkeypatch.delitem(sys.modules, "jax", raising=False)

    def add(file, text=""):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
        return tmp_path

    add.root = tmp_path
    return add


def test_a_plain_machine_serves_the_cpu(machine):
    assert environment.why_not("cpu", machine.root) == ""
    assert "jax[cuda13]" in environment.why_not("cuda", machine.root)


def test_platforms_that_leave_the_cpu_out(machine, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert "JAX_PLATFORMS=cuda leaves JAX without a backend for cpu tensors" in environment.why_not("cpu", machine.root)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert environment.why_not("cpu", machine.root) == ""


def test_why_not_any_tensor_to_serve_is_unavailable(machine, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    found = probe.probe(machine.root)
    assert isinstance(found, qcore.Unavailable)
    assert not found.broken
    assert found.reason == (
        "JAX_PLATFORMS=cuda leaves JAX without a backend for cpu tensors; add cpu to it before the process starts."
    )
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert isinstance(probe.probe(machine.root), qcore.Available)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setattr(probe, "installed_version", lambda name: "2.9" if name == "torch_xla" else "")
    assert isinstance(probe.probe(machine.root), qcore.Available)  # for tensors of torch_xla


def test_a_gpu_whose_memory_jax_would_take(machine, monkeypatch):
    monkeypatch.setattr(environment, "gpu_plugin", lambda: "jax_cuda13_plugin")
    root = machine("dev/nvidia0")
    for kind in ("cpu", "cuda"):
        assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in environment.why_not(kind, root)
    found = probe.probe(root)
    assert found.details["supports"] == "nothing yet"
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in found.details["needs"]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert environment.why_not("cpu", root) == ""
    assert "add cuda" in environment.why_not("cuda", root)
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert environment.why_not("cpu", root) == environment.why_not("cuda", root) == ""
    assert probe.probe(root).details == {"device": "cpu", "supports": "cpu, cuda"}


def test_a_program_that_uses_jax_already_has_decided(machine, monkeypatch):
    monkeypatch.setattr(environment, "gpu_plugin", lambda: "jax_cuda13_plugin")
    monkeypatch.setattr(environment, "initialised", lambda: True)
    assert environment.why_not("cuda", machine("dev/nvidia0")) == ""


def test_the_tpu_of_torch_tpu_is_left_alone(machine, monkeypatch):
    machine("sys/bus/pci/devices/0000:00:04.0/vendor", "0x1ae0\n")
    root = machine("sys/bus/pci/devices/0000:00:04.0/device", "0x006f\n")
    assert environment.tpu(root) == "v6e"
    assert "TPU v6e" in probe.probe(root).device
    real = environment.find_spec
    monkeypatch.setattr(environment, "find_spec", lambda name: name == "torch_tpu" or real(name))
    assert "set JAX_PLATFORMS=cpu" in environment.why_not("cpu", root)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert environment.why_not("cpu", root) == ""


def test_without_jax(monkeypatch):
    environment.why_not_jax.cache_clear()
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    found = probe.probe()
    environment.why_not_jax.cache_clear()
    assert found.broken
    assert "pip install 'jax" in found.reason


PROBE = """
import os, sys
before = dict(os.environ)
import qcore
from qcore_xla import plugin
found = plugin.qcore_probe()
from qcore.resolving.explaining import plain_request
answer = plugin.qcore_linear(plain_request("w8a16", device="cpu", n=64, k=64))
assert isinstance(answer, qcore.Offer), answer
heavy = {"jax", "jaxlib", "torch_xla", "torch_tpu", "torchax", "libtpu"} & set(sys.modules)
assert not heavy, heavy
assert dict(os.environ) == before
"""


def test_probes_and_offers_import_nothing_heavy():
    subprocess.run([sys.executable, "-c", PROBE], timeout=120, check=True)


def request(scheme="w8a16", contract="linear", **changes):
    made = CONTRACTS[contract].request_for(qcore.Scheme.parse(scheme), torch.device("cpu"), torch.bfloat16, 64, 64)
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(device=torch.device("meta")), "move them with"),
        (request(x_dtype=torch.float64, out_dtype=torch.float64), "float64 have no kernel here"),
        (request(output=qcore.OutputInt8(1.0, 0), out_dtype=torch.int8), "requires int8 activations"),
        (request("w8a8", output=qcore.OutputInt8(1.0, 0)), "a result with OutputInt8 is int8"),
        (request(n=0), "nothing to compute"),
        (request(contract="embedding", out_dtype=torch.float64), "results of dtype float64"),
    ],
)
def test_refusals_say_why(asked, reason):
    answer = HOOKS[asked.contract](asked)
    assert isinstance(answer, qcore.Refusal)
    assert reason in answer.reason


def test_a_tpu_without_int8_refuses_int8_activations(monkeypatch):
    engine = base.find("cpu")
    monkeypatch.setattr(eligibility.base, "find", lambda kind: engine)
    monkeypatch.setattr(environment, "tpu", lambda: "tpu7x")
    tpu = torch.device("xla")
    assert "tpu7x do not support int8" in eligibility.why_not(request("w8a8", device=tpu))
    assert eligibility.why_not(request("w8a16", device=tpu)) == ""


def test_offers_rank_below_kernels_made_for_a_device():
    assert probe.rank("cpu") < qcore.FALLBACK
    assert qcore.OFFLOAD < probe.rank("cuda") < qcore.NATIVE
