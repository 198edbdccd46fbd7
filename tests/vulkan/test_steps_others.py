"""Lookups and functions of single elements as steps on a device, and chains of steps."""

from __future__ import annotations

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from torch.nn import functional
from vulkan_problems import bring, place, run_embedding, vulkan  # noqa: F401

from qcore import quantize
from qcore.contracts import EMBEDDING
from qcore.weights.schemes import SCHEMES, Scheme
from qcore_vulkan import layout, steps
from qcore_vulkan.builder import Builder

FUNCTIONS = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if "a16" in scheme])
def test_lookups(vulkan, scheme):  # noqa: F811
    for case in EMBEDDING.cases([Scheme.parse(scheme)], DTYPES):
        problem = case.build(1)
        if problem.x.numel():
            verdict = EMBEDDING.judge(problem, run_embedding(vulkan, problem))
            assert verdict.ok, verdict.message


def test_lookups_in_a_table_of_several_parts(vulkan, monkeypatch):  # noqa: F811
    monkeypatch.setattr(layout, "rows_per_part", lambda *_: 8)
    for case in EMBEDDING.cases([Scheme.parse("w4a16-g32-fzp")], [torch.float16]):
        problem = case.build(2)
        if problem.x.numel():
            assert EMBEDDING.judge(problem, run_embedding(vulkan, problem)).ok


def run_elementwise(device, x: torch.Tensor, name: str) -> torch.Tensor:
    b = Builder(device)
    rows = bring(b, *x.shape, x.dtype)
    y = steps.elementwise(b, rows, name, b.output(steps.rows_bytes(*x.shape, x.dtype)))
    result = torch.empty_like(x)
    b.program([place(rows)], [place(y)]).run([x], [result])
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", steps.ELEMENTWISE)
def test_functions_of_elements(vulkan, name, dtype):  # noqa: F811
    x = torch.cat((torch.linspace(-12, 12, 401), torch.tensor([0.0, 1e-3, -1e-3, 60000.0, -60000.0])))
    x = x.to(dtype).reshape(2, -1)
    expected = FUNCTIONS[name](x.double())
    error = (run_elementwise(vulkan, x, name).double() - expected).abs()
    unit = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert (error <= 1.01 * unit * expected.abs() + 2.0**-20 * (1 + x.double().abs().clamp(max=12))).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", steps.ELEMENTWISE)
def test_not_a_number_stays_one(vulkan, name, dtype):  # noqa: F811
    x = torch.tensor([[torch.nan, -1.0, 2.0, -torch.nan]], dtype=dtype)
    assert run_elementwise(vulkan, x, name).isnan().tolist() == [[True, False, False, True]]


def test_a_chain_stays_on_the_device(vulkan):  # noqa: F811
    generator = torch.Generator().manual_seed(7)
    first, second = (quantize(torch.randn(n, k, generator=generator), "int8") for n, k in ((48, 20), (12, 48)))
    x = torch.randn(5, 20, generator=generator)
    b = Builder(vulkan)
    rows = bring(b, 5, 20, x.dtype)
    weights = [layout.upload(vulkan, weight) for weight in (first, second)]
    hidden = steps.linear(b, rows, weights[0], None, None, None, torch.float32)
    hidden = steps.elementwise(b, hidden, "relu")
    out = b.output(steps.rows_bytes(5, 12, torch.float32))
    y = steps.linear(b, hidden, weights[1], None, None, None, torch.float32, out=out)
    result = torch.empty(5, 12)
    b.program([place(rows)], [place(y)]).run([x], [result])
    dense = [weight.dequantize(torch.float64) for weight in (first, second)]
    expected = (x.double() @ dense[0].t()).relu() @ dense[1].t()
    assert torch.allclose(result.double(), expected, rtol=1e-5, atol=1e-4)
