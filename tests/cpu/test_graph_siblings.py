"""Linear layers on the same x, which programs run at once."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import nn

import qcore
from qcore.plugin_api import bound_layer
from qcore_cpu import native

assert not native.fault()

from qcore_cpu.graphs import steps  # noqa: E402 - its structures are those of the library

pytestmark = pytest.mark.usefixtures("fresh_compiler")

K = 96


class Siblings(nn.Module):
    """Layers of several sizes on one x, a function of the first between them."""

    def __init__(self, *sizes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(K, n) for n in sizes)

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


@torch.no_grad()
def test_no_more_move_than_run_at_once(order):
    """A program with many layers on one input does not hold all results at a time."""
    compiled(quantized(Many(), "w4a16-g32", torch.float32))(torch.randn(1, K))
    runs = "".join("L" if name == "Linear" else " " for name in order).split()
    assert runs == ["LLLL", "LLLL"]


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(K, 32) for _ in range(8))

    def forward(self, x):
        total = 0
        for layer in self.layers:
            total = total + layer(x).relu()
        return total


class Overlapping:
    """Two layers on one x as steps, whose results and biases lie at given numbers of one buffer."""

    def __init__(self):
        torch.manual_seed(0)
        self.x, self.memory = torch.randn(1, WIDE), torch.empty(1024)
        layers = [nn.Linear(WIDE, 128, bias=False) for _ in range(2)]
        self.layers = [qcore.nn.QuantizedLinear.from_float(one, "w8a16") for one in layers]
        self.y = [layer(self.x)[0] for layer in self.layers]

    def run(self, *places):
        """Each place: where a layer's result and its bias are, None for no bias."""
        program, bounds = steps.Steps(), [bound_layer(one, torch.float32) for one in self.layers]
        slots = [self.x, self.memory, *(bound.packed[name] for bound in bounds for name in ("data", "scale"))]
        for i, (bound, (y, bias)) in enumerate(zip(bounds, places, strict=True)):
            memory = [steps.NOWHERE if at is None else steps.Place(1, F32, 4 * at) for at in (bias, y)]
            weight = steps.Place(2 + 2 * i, 0, 0), steps.Place(3 + 2 * i, F32, 0)
            step = steps.Linear(steps.Place(0, F32, 0), *weight, *[steps.NOWHERE] * 4, *memory)
            step.rows, step.size = 1, bound.packed["data"].numel()
            program.append(step, bound.kernel.form)
        bases = (ctypes.c_void_p * len(slots))(*[one.data_ptr() for one in slots])
        program.run(0, program.count, bases)
        return self.memory


WIDE, F32 = 4096, steps.TYPES[torch.float32]


@pytest.mark.parametrize("threads", [2], indirect=True)
@torch.no_grad()
def test_memory_that_both_use_keeps_them_apart(threads):
    """Two threads would write a result, or a bias, while the other layer reads or writes it."""
    two = Overlapping()
    first, second = two.y
    for _ in range(40):
        two.memory.fill_(1e6)
        found = two.run((0, None), (200, 0))  # the first result is the second bias
        torch.testing.assert_close(found[200:328], first + second, rtol=1e-4, atol=1e-4)
        found = two.run((0, None), (64, None))  # the second result begins within the first
        torch.testing.assert_close(found[64:192], second, rtol=1e-4, atol=1e-4)
        two.memory[300:428] = 7
        found = two.run((0, 300), (300, None))  # the second result overwrites the first bias
        torch.testing.assert_close(found[:128], first + 7, rtol=1e-4, atol=1e-4)


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
