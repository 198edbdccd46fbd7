"""Constants that a device has no op for are computed once, when the graph is cut."""

import pytest
import torch
from graph_backends import TorchParts
from torch import nn

from qcore import graphs

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.zero = function, nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.function(x + self.zero)


def compiled(function, *refused):
    model = Model(function)
    return model, TorchParts(refused).compiled(model)


def powers(x):
    steps = torch.arange(1, 6, dtype=torch.float64).cumprod(0).float()
    shifted, factor = torch.full((5,), 1 << 40) >> 39, torch.erfinv(torch.tensor(0.9))
    return x * torch.full_like(steps, 2.0) + shifted + factor * steps.expand(3, 5)


@torch.no_grad()
def test_they_leave_one_part_and_nothing_on_the_host():
    model, call = compiled(powers, "erfinv", "cumprod", "full_like", "bitwise_right_shift")
    for _ in range(2):
        x = torch.randn(3, 5)
        torch.testing.assert_close(call(x), powers(x))
    found = graphs.explain(model)
    assert not found.host, str(found)
    assert found.submissions == 1


@torch.no_grad()
def test_they_stay_on_the_device():
    model = Model(powers)
    backend = TorchParts(["erfinv", "cumprod"])
    backend.compiled(model)(torch.randn(3, 5))
    (part,) = backend.parts
    roles = [one.role for one in part.inputs]
    assert roles.count(graphs.Role.FRESH) == 1  # x
    assert roles.count(graphs.Role.STATIC) == 3  # the parameter and two constants


@torch.no_grad()
def test_what_is_returned_has_memory_of_its_own():
    model, call = compiled(lambda x: (x + 1, torch.erfinv(torch.tensor(0.5))), "erfinv")
    for _ in range(2):
        _, result = call(torch.randn(3))
        assert float(result) == pytest.approx(0.4769, abs=1e-3)
        result.zero_()
    assert [node.op for node in graphs.explain(model).host] == ["erfinv"]


@torch.no_grad()
def test_random_numbers_differ_from_call_to_call():
    _, call = compiled(lambda x: x + torch.rand(3), "rand")
    assert not torch.equal(call(torch.zeros(3)), call(torch.zeros(3)))
