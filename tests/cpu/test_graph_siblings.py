"""Linear layers on the same x, which programs run at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qcore
from qcore_cpu import native

assert not native.fault()

from qcore_cpu.graphs import steps  # noqa: E402 - its structures are those of the library

pytestmark = pytest.mark.usefixtures("fresh_compiler")

K = 96


class Siblings(nn.Module):
    """Layers of several sizes on one x, a function of the first between them."""

    def __init__(self, *sizes, bias=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(K, n, bias=bias) for n in sizes)

    def forward(self, x):
        first = self.layers[0](x)
        return torch.nn.functional.silu(first), first, *(layer(x) for layer in self.layers[1:])


@pytest.fixture
def order(monkeypatch):
    """The names of the steps as they are appended."""
    names, append = [], steps.Steps.append
    monkeypatch.setattr(steps.Steps, "append", lambda *args: (names.append(type(args[1]).__name__), append(*args))[1])
    return names


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def compiled(model):
    return torch.compile(model, backend="qcore_cpu")


def quantized(model, scheme, dtype):
    model = model.to(dtype).eval()
    qcore.quantize_(model, scheme)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", [
    "w4a16-g32", "w4a16-g32-asym", "w4a16-g32-fzp", "w8a16", "w8a8", "w8a8-aasym", "w4a8-g32", "w8a8-static(0.05,3)",
    "wfp4a16-g32-e8m0", "wnf4a16-g64", "w4a16-g40",
])  # fmt: skip
@torch.no_grad()
def test_results_are_those_of_each_layer(scheme, dtype, threads):
    """Rows with an outlier, NaN and Inf as well: what is taken out of the digits is multiplied by each weight."""
    torch.manual_seed(0)
    model = quantized(Siblings(33, 160, 1, 64, 96, 250), scheme, dtype)
    run = compiled(model)
    for rows in (1, 3):
        x = torch.randn(rows, K, dtype=dtype)
        for value in (1.0, 3000.0, float("inf"), float("nan")):
            x[-1, 17] = value
            for found, expected in zip(run(x)[1:], model(x)[1:], strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def test_they_follow_each_other(order):
    model = quantized(Siblings(32, 64, 96), "w4a16-g32", torch.float32)
    compiled(model)(torch.randn(1, K))
    assert order == ["Linear", "Linear", "Linear", "Elementwise"]


class Depending(Siblings):
    """The second layer's bias is made of the first one's result, the third's result is not used."""

    def forward(self, x):
        first = self.layers[0](x)
        second = self.layers[1](x) + first.square()
        self.layers[2](x)
        return second, self.layers[3](x) * second


@torch.no_grad()
def test_results_that_die_and_sums_keep_their_memory(threads):
    torch.manual_seed(0)
    model = quantized(Depending(64, 64, 640, 64), "w4a16-g32", torch.float32)
    run = compiled(model)
    for _ in range(3):
        x = torch.randn(1, K)
        for found, expected in zip(run(x), model(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(K, 64), nn.Linear(K, 32), nn.Linear(K, 32)

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)


@pytest.mark.parametrize(("first", "second"), [
    ("w4a16-g32", "w8a16"), ("w4a16-g32", "w4a16-g96"), ("w8a8", "w8a16"), ("w8a8", "w8a8-aasym"),
    ("w8a8-static(0.05,3)", "w8a8-static(0.04,3)"), ("w4a16-g32", "w4a16-g32-asym"), ("w4a16-g32", "wfp4a16-g32"),
])  # fmt: skip
@torch.no_grad()
def test_layers_of_other_kinds_keep_their_own_rows(first, second, threads):
    torch.manual_seed(0)
    model = Mixed().eval()
    for name, scheme in (("q", first), ("k", second), ("v", first)):
        qcore.quantize_(model, {name: scheme})
    run, x = compiled(model), torch.randn(1, K)
    for found, expected in zip(run(x), model(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
