"""The example that brings a format of its own: built as a wheel, used and certified in a new interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from processes import installed_plugins

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "qcore-lm3"
SCHEMES = {"wlm3a16", "wlm3a16-g64", "wlm3a16-g64-fzp", "wlm3a16-g64/dense3"}

USE = """
import json, torch, qcore
from qcore import testing

torch.manual_seed(0)
weight = torch.randn(64, 200)
errors = {}
for quantizer in ("absmax", "mse", "lloyd"):
    made = qcore.quantize(weight, "lm3-g64/dense3", quantizer)
    errors[quantizer] = float((made.dequantize() - weight).norm())
model = torch.nn.Sequential(torch.nn.Linear(200, 64))
expected = qcore.quantize(model[0].weight, "lm3-g64/dense3", "lloyd").dequantize()
x = torch.randn(3, 200)
wanted = torch.nn.functional.linear(x, expected, model[0].bias).detach()
qcore.quantize_(model, "wlm3a16-g64@lloyd/dense3")
worst = float((model(x) - wanted).abs().max())
qcore.save(model, "model.safetensors")
again = torch.nn.Sequential(torch.nn.Linear(200, 64))
qcore.load_(again, "model.safetensors")
certificate = testing.run("lm3", seed=11, select=["wlm3", "[plugin]"])
print(json.dumps({
    "worst": worst, "plugin": model[0].decision.plugin, "errors": errors, "bits": made.nbytes * 8 / weight.numel(),
    "reloaded": bool(torch.equal(again(x), model(x))), "ok": certificate.ok, "text": str(certificate),
    "closing": certificate.closing(),
    "cases": {case.id: [case.contract, case.scheme, str(case.outcome)] for case in certificate.cases},
}))
"""

WITHOUT = """
import qcore, torch
try:
    qcore.load_(torch.nn.Sequential(torch.nn.Linear(200, 64)), "model.safetensors")
except qcore.QcoreError as error:
    print(error)
"""


def _distributions():
    spec = spec_from_file_location("thirdparty_distributions", HERE / "distributions.py")
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(script, where, *site):
    path = os.pathsep.join([*map(str, site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, "QCORE_CACHE_DIR": str(where / "cache"), "OMP_NUM_THREADS": "1"}
    environment["QCORE_DISABLE"] = installed_plugins()  # only the example is under test
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False, cwd=where)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a program finds with the example installed, and what it prints after the example is gone."""
    where, distributions = tmp_path_factory.mktemp("lm3"), _distributions()
    site = distributions.install(distributions.build(EXAMPLE, where), where / "site")
    answers = json.loads(_run(USE, where, site).splitlines()[-1])
    return {**answers, "without": _run(WITHOUT, where)}


def test_its_kernel_runs_the_layer(found):
    assert found["plugin"] == "lm3"
    assert found["worst"] < 1e-4


def test_a_weight_takes_three_bits_and_its_scales(found):
    assert found["bits"] == pytest.approx(3 + 32 * 4 / 200)


def test_its_quantizer_is_as_good_as_a_search_of_core(found):
    assert found["errors"]["lloyd"] <= 1.001 * found["errors"]["mse"] < found["errors"]["absmax"]


def test_a_checkpoint_is_read_again(found):
    assert found["reloaded"]


def test_a_checkpoint_without_the_plugin_says_what_is_missing(found):
    assert "dense3" in found["without"] or "lm3" in found["without"]
    assert "plugin" in found["without"]


def test_it_passes_the_kit(found, capsys):
    with capsys.disabled():
        print(f"\nqcore-lm3: {found['closing']}")
    assert found["ok"], found["text"]


def test_the_kit_made_its_cases_from_the_element(found):
    linear = {name: rest for name, rest in found["cases"].items() if rest[0] == "linear"}
    assert {scheme for _, scheme, _ in linear.values()} == SCHEMES
    assert {outcome for *_, outcome in linear.values()} == {"passed"}
    assert len(linear) > 150
    assert {outcome for contract, _, outcome in found["cases"].values() if contract != "linear"} == {"refused"}
