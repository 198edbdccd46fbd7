"""The plugin as qcore finds it: light to look at, and never mistaken for its stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from linear_problems import linear_problem

import qcore
from qcore_xpu import ops

SCRIPT = """
import json, sys
import torch
import qcore
import qcore_xpu.plugin as plugin
state = plugin.qcore_probe()
for device in ("cpu", "xpu:0"):
    plugin.qcore_linear(qcore.LinearRequest(
        torch.device(device), torch.bfloat16, torch.bfloat16, 16, 64, None, qcore.grouped_int4(32), None, None, False,
        False,
    ))
status = {s.name: s for s in qcore.plugins()}["xpu"]
print(json.dumps([type(state).__name__, status.state.value, status.reason, [m for m in sys.modules if m == "triton"]]))
"""


def run(script, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_looking_at_the_plugin_imports_no_triton():
    probed, state, reason, triton = run(SCRIPT)
    assert triton == []
    assert state in ("available", "unavailable")
    assert (probed == "Available") == (state == "available") == (reason == "")


STAND_IN = """
import json
import qcore
import qcore_xpu_stand_in.plugin as plugin
import sys
first = plugin.qcore_probe()
heavy = [m for m in ("triton", "qcore_xpu", "qcore_xpu.serving") if m in sys.modules]
print(json.dumps([type(first).__name__, getattr(first, "reason", ""), heavy]))
"""


def test_the_stand_in_needs_the_interpreter_and_says_so():
    kind, reason, heavy = run(STAND_IN, TRITON_INTERPRET="0")
    assert kind == "Unavailable"
    assert "set TRITON_INTERPRET=1 before Triton is imported" in reason
    assert heavy == []
    assert run(STAND_IN, TRITON_INTERPRET="1")[0] == "Available"


def test_nothing_on_a_cpu_says_that_xpu_served(interpreter, stand_in):
    problem = linear_problem("w4a16-g32", 3, 16, 64)
    states = {status.name: status.state.value for status in qcore.plugins()}
    assert states["xpu_stand_in"] == "available"
    assert torch.xpu.is_available() or states["xpu"] == "unavailable"

    def layer():
        scheme = qcore.Scheme.parse("w4a16-g32")
        return qcore.nn.QuantizedLinear.from_qtensor(problem.weight, None, scheme, dtype=torch.bfloat16)

    with qcore.using("xpu_stand_in"):
        asked_for = layer()
        asked_for(problem.x)
    assert {call.op for call in stand_in.calls()} == {"int4_mm"}
    assert asked_for.decision.kernel.name == "xpu_stand_in.w4a16"
    stand_in.forget()
    plain = layer()
    plain(problem.x)
    assert stand_in.calls() == []
    assert plain.decision.kernel.name.startswith("torch.")


@pytest.mark.parametrize("contract", ["linear", "conv2d", "embedding"])
def test_the_stand_in_serves_the_cpu_alone(stand_in, contract):
    from qcore_xpu_stand_in import plugin

    from qcore.contracts import CONTRACTS

    serve = getattr(plugin, f"qcore_{contract}")
    scheme = qcore.Scheme.parse("w8a16")
    request = CONTRACTS[contract].request_for(scheme, torch.device("xpu:0"), torch.bfloat16, 16, 64)
    assert serve(request) == qcore.Refusal("the stand-in runs on the CPU, and the tensors are on xpu:0.")
    offer = serve(CONTRACTS[contract].request_for(scheme, torch.device("cpu"), torch.bfloat16, 16, 64))
    assert offer.rank == qcore.EMULATED
    assert offer.kernel.name.startswith("xpu_stand_in.")


def test_the_stand_in_registers_every_op_for_the_cpu(stand_in):
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("qcore_xpu::")]
    assert len(names) == 9
    for key in ("CPU", "XPU"):
        assert all(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name in names)


def test_tensors_on_a_gpu_run_on_theirs(monkeypatch):
    entered = []

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *rest):
            entered.append("left")

    class Far:
        device = torch.device("xpu:1")

    monkeypatch.setattr(torch.xpu, "device", Device)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 0)
    with torch.autocast("xpu", dtype=torch.bfloat16), ops.device_guard(Far()):
        assert entered == [torch.device("xpu:1")]
        assert not torch.is_autocast_enabled("xpu")
    assert entered[-1] == "left"
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 1)
    with ops.device_guard(Far()):
        assert len(entered) == 2


def test_answers_are_plain_values(stand_in):
    import plugin_answers
    from qcore_xpu_stand_in import plugin as stand_in_plugin

    from qcore_xpu import plugin

    for mine, device in ((plugin, "cpu"), (plugin, "cuda:0"), (stand_in_plugin, "cpu")):
        hooks = {contract: getattr(mine, f"qcore_{contract}") for contract in ("linear", "conv2d", "embedding")}
        assert not list(plugin_answers.faults(mine, hooks.__getitem__, device))
