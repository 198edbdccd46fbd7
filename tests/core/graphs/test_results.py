"""What compiled models return: torch's strides where elements are next to each other in memory."""

import pytest
import torch
from graph_backends import TorchParts

from qcore import graphs
from qcore.graphs import base_name

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Dense(TorchParts):
    """Returns results in row-major order, as devices do."""

    def compile(self, part):
        run = super().compile(part)
        return lambda values: [y.contiguous() for y in run(values)]


class Apart(TorchParts):
    """Returns each result in memory of its own, as devices do."""

    def compile(self, part):
        run = super().compile(part)
        return lambda values: [y.clone() for y in run(values)]


X = torch.arange(120.0).view(2, 3, 4, 5)


@torch.no_grad()
@pytest.mark.parametrize("function", [
    lambda x: x.transpose(1, 2) * 2, lambda x: (x + 1).permute(3, 0, 2, 1), lambda x: (x.mT + 1, x * 2, (x - 1).mT),
    lambda x: x.to(memory_format=torch.channels_last) * 2, lambda x: x[:, :1].transpose(0, 1).cos(),
    lambda x: (x.mT + 1).sin() * 2, lambda x: (x.mT.sin() + 1).cumsum(-1) * x.mT,
])  # fmt: skip
@pytest.mark.parametrize("refused", [(), ("sin",), ("cumsum",), ("permute",), ("sin", "permute")])
def test_results_have_the_strides_of_torch(function, refused):
    x = X.clone()
    found, expected = Dense(refused=refused).compiled(function)(x), function(x)
    pairs = [*zip(found, expected, strict=True)] if isinstance(expected, tuple) else [(found, expected)]
    for one, other in pairs:
        torch.testing.assert_close(one, other)
        if "permute" not in refused:
            assert one.stride() == other.stride()


@torch.no_grad()
def test_written_arguments_keep_their_strides():
    def function(x, y):
        x.copy_(y.mT * 2)
        y.mul_(3)
        return x.mT + 1, y.mT

    x, y = torch.randn(4, 3), torch.randn(3, 4)
    mine, compiled = (x.clone(), y.clone()), Dense().compiled(function)
    for _ in range(2):
        for one, other in zip(compiled(*mine), function(x, y), strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
        torch.testing.assert_close(mine, (x, y))


@torch.no_grad()
def test_what_another_part_takes_is_not_turned():
    backend, x = Dense(refused=("sin",)), torch.randn(3, 4)
    compiled = backend.compiled(lambda x: (x.mT + 1) * (x.mT + x.sum()).sum().sin())
    torch.testing.assert_close(compiled(x), (x.mT + 1) * (x.mT + x.sum()).sum().sin())
    turns = [sum(base_name(node.target) == "permute" for node in part.nodes) for part in backend.parts]
    assert turns == [1, 1]  # that of the function, and one for its result
    assert len(graphs.explain().host) == 1


def of(function):
    """Calls ``function`` with a tensor that has memory of its own."""
    return lambda x: function(x + 1)


SHARING = {
    "owner": of(lambda y: (y, y[0], y.mT)),
    "views": of(lambda y: (y[:, :2], y[1:], y[:, 1:3])),
    "pieces": of(lambda y: (y, *y.split(2, -1))),
    "other_dtype": of(lambda y: (y.view(torch.int32), y)),
    "copies": lambda x: (x.clone(), x.clone(), x + 1, x + 1),
    "of_an_argument": lambda x: (x[0], x.mT, x * 2),
    "of_a_copy": of(lambda y: (y, y.clone()[:1], y.clone()[0])),
    "written_before": of(lambda y: (y[0].add_(1), y.mul_(2))),
}


@torch.no_grad()
@pytest.mark.parametrize("refused", [(), ("select",), ("add",)])
@pytest.mark.parametrize("name", SHARING)
def test_writes_to_a_result_show_in_those_that_share_its_memory(name, refused):
    function, given = SHARING[name], (torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4))
    compiled = Apart(refused=refused).compiled(function)
    for _ in range(2):
        found, expected = compiled(given[0]), function(given[1])
        for one, other in zip(found, expected, strict=True):
            one.mul_(3)
            other.mul_(3)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*given)


@torch.no_grad()
def test_results_beside_a_write_through_a_view():
    def function(x):
        x.view(3, 2, 2)[:, 1].add_(1)
        y = x * 2
        return x[:, :3], y[0], y

    given, backend = (torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4)), Apart()
    compiled = backend.compiled(function)
    for _ in range(2):
        found, expected = compiled(given[0]), function(given[1])
        found[1].mul_(3)
        expected[1].mul_(3)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*given)
    assert not graphs.explain().refused


@torch.no_grad()
def test_writes_behind_a_break_to_a_view_from_before_it():
    def function(x):
        y = x * 2
        y[0][y[0] > 3] += 1  # a break: the size depends on values
        return y

    x, backend = torch.arange(12.0).view(3, 4), Apart()
    torch.testing.assert_close(backend.compiled(function)(x), function(x))
    assert backend.parts
