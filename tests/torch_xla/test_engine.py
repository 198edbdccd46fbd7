"""Bodies on XLA tensors: against the contracts, through qcore, and compiled by torch.compile(backend="openxla")."""

from __future__ import annotations

import pytest
import torch

import qcore
from qcore.contracts.conv2d import CONV2D
from qcore.contracts.embedding import EMBEDDING
from qcore.contracts.linear import LINEAR
from qcore.weights.schemes import SCHEMES, Scheme
from qcore_xla import plugin
from qcore_xla.engines import base
from qcore_xla.engines.torch_xla import ENGINE
from qcore_xla.quantized_matmul import XlaQuantizedLinear

SHAPES = ("k-ragged", "bias", "rows-17")


def served(contract, case, device):
    problem = case.build(0, device)
    offer = getattr(plugin, contract.hook)(problem.request)
    assert isinstance(offer, qcore.Offer), offer
    kernel, moved = offer.kernel, problem.to(device)
    packed = kernel.pack(moved.weight)
    result = kernel(moved.x, packed, moved.bias, **moved.given)
    assert result.device.type == "xla"
    verdict = contract.judge(problem, result)
    assert verdict.ok, verdict.message
    return kernel, packed, problem


def cases(contract, scheme, dtype, names):
    found = {case.id: case for case in contract.cases([Scheme.parse(scheme)], [dtype])}
    return [case for name, case in found.items() if name.endswith(tuple(f"-{shape}]" for shape in names))]


@pytest.mark.parametrize(("scheme", "shape"), [(scheme, SHAPES[i % 3]) for i, scheme in enumerate(SCHEMES)])
def test_linear(scheme, shape, device):
    dtype = (torch.float32, torch.bfloat16)[len(scheme) % 2]
    for case in cases(LINEAR, scheme, dtype, [shape])[:1]:
        served(LINEAR, case, device)


@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w8a8"])
def test_unpacking_is_exact(scheme, device):
    (case, *_) = cases(LINEAR, scheme, torch.float32, ["k-odd"])
    kernel, packed, problem = served(LINEAR, case, device)
    weight = kernel.unpack(packed)
    for name, tensor in problem.weight.tensors().items():
        assert torch.equal(weight.tensors()[name].cpu(), tensor)


@pytest.mark.parametrize(
    ("contract", "scheme"), [(CONV2D, "w8a8"), (CONV2D, "w8a16"), (EMBEDDING, "w4a16-g32"), (EMBEDDING, "w8a16")]
)
def test_other_contracts(contract, scheme, device):
    found = list(contract.cases([Scheme.parse(scheme)], [torch.float32]))
    for case in (found[1], found[len(found) // 2]):
        served(contract, case, device)


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g32-asym", "w8a8", "w4a8-g32"])
def test_compiled_by_openxla(scheme, device):
    layer = qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(64, 32), scheme)
    x = torch.randn(3, 64)
    expected = layer(x).detach()
    layer.to(device)
    compiled = torch.compile(layer, backend="openxla", fullgraph=True)
    with torch.no_grad():
        for scale in (1.0, 2.0):  # the second call runs what the first one compiled
            result = compiled(x.to(device) * scale)
            reference = layer(x.to(device) * scale)
            torch.testing.assert_close(result.cpu(), reference.cpu(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(compiled(x.to(device)).cpu(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("activation", [False, True])
@pytest.mark.parametrize("block", [-1, 32])
def test_rows_of_the_table_that_torch_xla_says_no_to(block, activation, device):
    fmt = qcore.Format("int4", None if block == -1 else block, qcore.ZeroPoint.INT)
    weight = qcore.quantize(torch.randn(32, 64), fmt)
    layer = XlaQuantizedLinear(64, 32, block_size=block, int4_weight=True, quantize_activation=activation)
    layer.load_quantized_weight(weight)
    x = torch.randn(3, 64)
    expected = x @ weight.dequantize().t()
    for where in ("cpu", device):
        result = layer.to(where)(x.to(where)).cpu()
        assert float((result - expected).abs().max() / expected.abs().max()) < 0.02


def test_an_unused_argument_and_a_missing_one(device):
    def body(x, missing, unused, *, form):
        assert missing is None
        return x * form

    x = torch.arange(4.0)
    assert torch.equal(ENGINE.run(body, 3, [x.to(device), None, x.to(device)], (0,)).cpu(), x * 3)


def test_the_device_is_served(device):
    assert base.find("xla") is ENGINE
    assert ENGINE.why_not(device) == ""
