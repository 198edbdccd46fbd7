"""A compiled part that finds out at its first call that it cannot run: torch runs it."""

import copy
import warnings

import pytest
import torch
from graph_backends import TorchParts
from torch import nn

import qcore
from qcore import graphs

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Refusing(TorchParts):
    """Refuses each part when it is called, before it has done anything."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = 0

    def compile(self, part):
        super().compile(part)

        def run(values):
            self.calls += 1
            raise graphs.PartRefused("this shape is not for us\nand more")

        return run


class Counting(nn.Module):
    """Adds one to a state in each call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 16)
        self.register_buffer("count", torch.zeros(16))

    def forward(self, x):
        self.count.add_(1)
        return self.linear(x).relu() + self.count, x * 2


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_runs_it_from_then_on(dynamic):
    model, backend, x = Counting(), Refusing(), torch.randn(3, 32)
    qcore.quantize_(model, "w8a16")
    expected, compiled = copy.deepcopy(model), backend.compiled(model, dynamic=dynamic)
    with pytest.warns(qcore.QcoreWarning, match="torch_parts: a part runs in torch: this shape is not for us$"):
        torch.testing.assert_close(compiled(x), expected(x))
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected(x))
    assert torch.equal(model.count, expected.count)
    assert backend.calls == 1
    found = graphs.explain(compiled)
    assert not found.submissions
    assert {node.reason for node in found.host} == {"this shape is not for us"}
    assert {"linear", "relu", "mul"} <= {node.op for node in found.host}


@torch.no_grad()
def test_the_other_parts_stay_on_the_device():
    class First(Refusing):
        def compile(self, part):
            return super().compile(part) if not self.parts else TorchParts.compile(self, part)

    model, backend, x = (
        nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8)),
        First(refused=["sigmoid"]),
        torch.ones(2, 8),
    )
    compiled = backend.compiled(model)
    with pytest.warns(qcore.QcoreWarning, match="a part runs in torch"):
        torch.testing.assert_close(compiled(x), model(x))
    found = graphs.explain(compiled)
    assert found.submissions == 1
    assert {node.reason for node in found.host} == {"no kernel for sigmoid", "this shape is not for us"}


class RefusingNegatives(TorchParts):
    """Refuses calls with negative numbers, and only these."""

    def compile(self, part):
        run = super().compile(part)

        def guarded(values):
            if any((value < 0).any() for value in values):
                raise graphs.PartRefused("a number is negative", once=True)
            return run(values)

        return guarded


@torch.no_grad()
def test_single_calls_in_torch():
    model, x = Counting(), torch.ones(3, 32)
    expected, compiled = copy.deepcopy(model), RefusingNegatives().compiled(model)
    for parameter in (*model.parameters(), *expected.parameters()):
        parameter.abs_()
    for given in (x, -x, x, -2 * x, x):
        context = (
            warnings.catch_warnings() if given is x else pytest.warns(qcore.QcoreWarning, match="for a call: a num")
        )
        with context:
            torch.testing.assert_close(compiled(given), expected(given))
    assert torch.equal(model.count, expected.count)
    found = graphs.explain(compiled)
    assert found.submissions == 1
    assert not found.host
    assert [report.calls for report in found.reports] == [{"a number is negative": 2}]
    assert "torch: 2 call(s) of a part: a number is negative" in str(found)
