"""Every kind of broken plugin at every stage: the right answer, one warning, and nobody else is bothered."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path

import broken_plugins
import pytest
import torch
from broken_plugins import KINDS, GoodKernel
from grids import sampled

import qcore
from qcore.cli import doctor, health
from qcore.discovery.registry import BUILTIN, _Entry, registry
from qcore.formats import layouts
from qcore.resolving.explaining import plain_request
from qcore.runtime import guard, process_state

_versions = itertools.count(1)


@pytest.fixture(scope="module")
def weight():
    generator = torch.Generator().manual_seed(0)
    return qcore.quantize(torch.randn(24, 64, generator=generator), "int8")


@pytest.fixture
def neighbours(monkeypatch):
    """``neighbours(kind)``: a registry with a broken plugin, a healthy one and the fallback."""
    monkeypatch.setattr(layouts, "_LAYOUTS", dict(layouts._LAYOUTS))
    monkeypatch.setattr(guard, "_state_changers", set())

    def install(kind):
        good = broken_plugins.ModuleType("healthy")
        good.qcore_linear = qcore.hookimpl(
            lambda request: qcore.Offer(GoodKernel("healthy.kernel", request), qcore.NATIVE - 1)
        )
        version = f"1.{next(_versions)}"
        entries = (kind.entry(version), _Entry("healthy", "qcore-healthy", version, lambda: good))
        builtin = {BUILTIN: registry.entries()[BUILTIN]}
        monkeypatch.setattr(registry, "_entries", {**{e.name: e for e in entries}, **builtin})
        registry.generation += 1

    yield install
    registry.generation += 1


def _looked_at(model):
    """Everything that shows plugins; what is returned is what people read."""
    statuses = qcore.plugins()
    decision = qcore.explain("w8a16", n=24, k=64, dtype=torch.float32)
    found = doctor._result(health.machine(), [], statuses, health.plugin_findings(statuses))
    shown = (decision, qcore.report(model), model, *health.left_findings(statuses))
    return "\n".join([json.dumps(found.data), json.dumps(decision.to_json()), *map(str, shown)])


def _run(weight, x):
    model = torch.nn.Sequential(qcore.nn.QuantizedLinear.from_qtensor(weight))
    results = [model(x) for _ in range(3)]
    saved = model.state_dict()
    return model, results, saved


@pytest.mark.parametrize("kind", sampled(KINDS, 60), ids=str)
def test_a_broken_plugin_costs_itself_and_nobody_else(kind, neighbours, weight):
    neighbours(kind)
    x = torch.linspace(-1, 1, 3 * 64).reshape(3, 64)
    expected = x @ weight.dequantize().t()
    state, place = process_state.snapshot(), Path.cwd()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, results, saved = _run(weight, x)
            shown = _looked_at(model)
            request = plain_request("w8a16", n=24, k=64, dtype=x.dtype)
            assert qcore.resolve(request, backends="healthy").plugin == "healthy"
        assert kind.stage == "call" or Path.cwd() == place
    finally:
        changed = state()
    for result in results:
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(saved["0.weight.data"], weight.data)
    assert torch.equal(saved["0.weight.scale"], weight.scale)
    named = [str(w.message)[:2000] for w in caught if "broken" in str(w.message)]
    others = [str(w.message)[:2000] for w in caught if "broken" not in str(w.message)]
    assert not others
    assert len(named) == (0 if kind.harmless else 1), named
    assert len(shown) < 100_000
    assert kind.stage == "call" or not set(changed) - {process_state.SEED}
    shown.encode()
