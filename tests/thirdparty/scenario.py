"""Run in a new interpreter: use qcore beside the plugins that are installed there, run the kit on them, print JSON.

Arguments: a JSON object with ``use`` (plugins to ask for by name), ``kit`` (plugins to test), ``select`` and
``probe_seconds``.
"""

import json
import sys
import warnings

import torch

import qcore
from qcore import testing

SCHEME = "w4a16-g32-asym"
ROWS = (3, 100)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    # 33 inputs: an odd K.
    return torch.nn.Sequential(torch.nn.Linear(64, 33), torch.nn.ReLU(), torch.nn.Linear(33, 7)).eval()


def expected(x: torch.Tensor) -> torch.Tensor:
    """The quantized network by its definition: dense weights, no kernel of anybody's."""
    scheme = qcore.Scheme.parse(SCHEME)
    for layer in network():
        if isinstance(layer, torch.nn.Linear):
            weight = qcore.quantize(layer.weight, scheme.weight, scheme.quantizer).dequantize()
            x = torch.nn.functional.linear(x, weight, layer.bias)
        else:
            x = layer(x)
    return x.detach()


def use(backends: str | None) -> dict:
    """Quantize and run, on few and on many rows; a defective plugin that is named raises on purpose."""
    try:
        return run_model(backends)
    except qcore.PluginError as error:
        return {"error": str(error)}


def run_model(backends: str | None) -> dict:
    with warnings.catch_warnings(record=True) as caught, qcore.using(backends), torch.no_grad():
        warnings.simplefilter("always")
        model = network()
        qcore.quantize_(model, SCHEME)
        worst = 0.0
        for rows in ROWS:
            x = torch.randn(rows, 64)
            worst = max(worst, float((model(x) - expected(x)).abs().max()))
        tables = [str(layer.decision) for layer in model if hasattr(layer, "decision")]
        served = [layer.decision.plugin for layer in model if hasattr(layer, "decision")]
    told = [str(w.message) for w in caught if issubclass(w.category, qcore.QcoreWarning)]
    return {"worst": worst, "served": served, "tables": tables, "warnings": told}


def certify(name: str, select: list[str], schemes: list[str] | None) -> dict:
    certificate = testing.run(name, seed=11, select=select, schemes=schemes)
    failures = [{"id": r.id, "law": r.law, "reason": r.reason} for r in certificate.failures]
    cases = {r.id: str(r.outcome) for r in certificate.cases}
    return {
        "ok": certificate.ok,
        "state": certificate.state,
        "text": str(certificate),
        "failures": failures,
        "cases": cases,
    }


def main() -> None:
    wanted = json.loads(sys.argv[1])
    if "probe_seconds" in wanted:
        sys.modules["qcore.discovery.registry"].PROBE_SECONDS = wanted["probe_seconds"]
    found = {"used": {name or "": use(name) for name in (None, *wanted.get("use", ()))}}
    found["status"] = {s.name: [str(s.state), s.reason] for s in qcore.plugins()}
    more, few = wanted.get("more", {}), wanted.get("schemes")
    found["kit"] = {name: certify(name, wanted["select"] + more.get(name, []), few) for name in wanted.get("kit", ())}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
