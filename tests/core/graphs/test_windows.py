"""Caches of sliding windows: a roll and a write at its end are one joining of slices."""

import pytest
import torch
from graph_backends import TorchParts
from torch import nn

from qcore.graphs import base_name

pytestmark = pytest.mark.usefixtures("fresh_compiler")
X = torch.arange(60.0).view(3, 4, 5)
END = torch.tensor([-1])


def names_of(function, *args):
    """The names of the ops of the only part of ``function``, whose results are torch's."""
    backend = TorchParts()
    with torch.no_grad():
        found, expected = backend.compiled(function)(*args), function(*args)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    (part,) = backend.parts
    return [base_name(node.target) for node in part.nodes]


def test_rolls_are_slices():
    def rolls(x):
        y = x.roll(1, 0), x.roll(-2, -1), x.roll((1, 7), (0, 2)), x.roll(3), x.roll(0, 1), x.roll(-4, 1), x.roll(9, 1)
        return *y, x[:, :0].roll(2, 1), x.long().roll(1, 2), (x > 9).roll(1, 2)

    assert {"index_select", "index"}.isdisjoint(names_of(rolls, X))


def slid(x, new, place=-1, shift=-1):
    y = x.roll(shift, -2)
    y[:, torch.tensor([place])] = new
    return (y,)


@pytest.mark.parametrize("new", [torch.randn(3, 1, 5), torch.randn(5), torch.tensor(2.0), torch.randn(3, 1, 1)])
def test_a_new_last_element_is_joined(new):
    names = names_of(slid, X, new)
    assert names.count("cat") == 1
    assert {"index_put", "index_select"}.isdisjoint(names)


@pytest.mark.parametrize(("place", "shift"), [(0, -1), (1, -1), (-1, 1), (-1, -2)])
def test_other_elements_are_written(place, shift):
    assert "index_put" in names_of(lambda x, new: slid(x, new, place, shift), X, torch.randn(3, 1, 5))


def test_first_elements_and_indices_without_dimensions():
    def first(x, new):
        y, z = x.roll(1, 1), x.roll(-1, 0)
        y[:, torch.tensor([0])] = new
        z[torch.tensor(2)] = new[0]
        return y, z

    assert "index_put" not in names_of(first, X, torch.randn(3, 1, 5))


def test_writes_that_add_and_indices_of_arguments():
    def others(x, new, at):
        y, z = x.roll(-1, 1), x.roll(-1, 1)
        y.index_put_((torch.arange(3)[:, None], END), new, accumulate=True)
        z[:, at] = new
        return y, z, x.roll(-1, 1).index_put((torch.arange(3), torch.tensor(3)), new[:, 0])

    assert names_of(others, X, torch.randn(3, 1, 5), torch.tensor([-1])).count("index_put") == 3


@pytest.mark.parametrize("index", [
    lambda: torch.full((1,), 3), lambda: torch.arange(3, 4), lambda: torch.tensor([2]) + 1,
    lambda: torch.tensor([[-1]]),
])  # fmt: skip
def test_indices_that_the_graph_computes_of_constants(index):
    def function(x, new):
        y = x.roll(-1, 1)
        y[:, index()] = new
        return (y,)

    assert "index_put" not in names_of(function, X, torch.randn(5))


@torch.no_grad()
@pytest.mark.parametrize(("place", "dtype"), [(4, torch.float32), (-5, torch.float32), (3, torch.float64)])
def test_writes_that_torch_refuses(place, dtype):
    """Out of range, or of another dtype."""
    for call in (slid, TorchParts().compiled(slid)):
        with pytest.raises((IndexError, RuntimeError)):
            call(X, torch.randn(5, dtype=dtype), place)


def test_rolls_have_the_strides_of_torch():
    def rolls(x):
        return x.roll(4, 1), x.roll((1, -3), (0, 0)), x.roll(5, 2), x.roll((3, 2), (0, 1)), x.roll(60)

    for x in (X, X.transpose(0, 1), X.transpose(1, 2), X[None].contiguous(memory_format=torch.channels_last)):
        found = TorchParts().compiled(rolls)(x)
        assert [one.stride() for one in found] == [one.stride() for one in rolls(x)]
        assert all(map(torch.equal, found, rolls(x)))


class Window(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, 4, 3))

    def forward(self, key):
        keys = self.keys.roll(-1, -2)
        keys[:, :, torch.tensor([-1])] = key
        self.keys.copy_(keys)
        return (self.keys * 2,)


def test_a_window_is_a_state():
    model, backend = Window(), TorchParts()
    compiled, keys = backend.compiled(model), torch.randn(6, 1, 2, 1, 3)
    with torch.no_grad():
        for key in keys:
            (y,) = compiled(key)
    expected = keys[2:].squeeze(3).permute(1, 2, 0, 3)
    assert torch.equal(model.keys, expected)
    assert torch.equal(y, expected * 2)
    assert len(backend.parts) == 1
    assert len(backend.parts[0].updates) == 1
