"""Tensors without dimensions as indices: torch asks them for their value, of which a program does not depend."""

import warnings

import pytest
import torch
from graph_backends import TorchParts

import qcore
from qcore.graphs import explain

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def writes(table, x, k):
    table[k] = x
    table[:, k] = x[0]
    return (table * 2,)


def writes_last(table, x, k):
    table[..., k] = 1.0
    return (table * 2,)


def reads(table, x, k):
    return table[k] * 2, table[:, k] * 2, table[k, k] + k, table[k][:, k] * 2


def parts(table, x, k):
    """Dynamo takes no value for a constant here."""
    return table.select(1, k) * 2, table.narrow(0, k, 1) * 2 + k, x * k


def views(table, x, k):
    """A part that is written through, and one that is returned."""
    table[k].mul_(2)
    return table[k], table * 1


def calls(function, backend, numbers, dtype):
    """Results and tables of a compiled function and of torch, for each number."""
    compiled, mine = backend.compiled(function), torch.randn(5, 5, 5)
    theirs, found, expected = mine.clone(), [], []
    with torch.no_grad():
        for number in numbers:
            x, k = torch.randn(5, 5), torch.tensor(number, dtype=dtype)
            found += [one.clone() for one in (*compiled(mine, x, k.clone()), mine)]
            expected += [one.clone() for one in (*function(theirs, x, k.clone()), theirs)]
    return found, expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("function", [writes, writes_last, reads, parts, views])
def test_indices_run_on_the_device(function, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error", qcore.QcoreWarning)
        found, expected = calls(function, TorchParts(), (3, 0, 2, 4, 1, 2), dtype)
    assert all(map(torch.equal, found, expected))
    assert not explain().refused


def counts(table, x, k):
    """An index that is counted afterwards, as caches of models do."""
    table[k] = x[0]
    y = table[:, k] * 2
    k += 1
    return y, k * 1


def counts_first(table, x, k):
    """Dynamo does not record this as one graph, unless values of tensors are captured."""
    k += 1
    return table + k, table[k] * 2


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("function", [counts, counts_first])
def test_indices_that_the_graph_writes(function, captured):
    with torch._dynamo.config.patch(capture_scalar_outputs=captured):
        found, expected = calls(function, TorchParts(), (0, 1, 2, 3), torch.int64)
    assert all(map(torch.equal, found, expected))


def test_a_counted_index_runs_on_the_device():
    with warnings.catch_warnings():
        warnings.simplefilter("error", qcore.QcoreWarning)
        found, expected = calls(counts, TorchParts(), (0, 1, 2, 3), torch.int64)
    assert all(map(torch.equal, found, expected))
    assert not explain().refused


def test_starts_of_parts_share_a_program():
    backend = TorchParts()
    found, expected = calls(parts, backend, (2, 3, 4), torch.int64)
    assert all(map(torch.equal, found, expected))
    assert len(backend.parts) == 1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:torch_parts. this call runs in torch:qcore.QcoreWarning")
def test_an_index_out_of_range_is_an_error():
    compiled = TorchParts().compiled(parts)
    table, x = torch.randn(5, 5, 5), torch.randn(5, 5)
    compiled(table, x, torch.tensor(2))
    with pytest.raises((IndexError, RuntimeError)):
        compiled(table, x, torch.tensor(7))


def test_masks_are_no_indices():
    def function(table, x, k):
        return table[k > 1] * 2, table[k.to(torch.uint8) == 2] * 2

    found, expected = calls(function, TorchParts(), (2, 3), torch.int64)
    assert all(map(torch.equal, found, expected))


@torch._dynamo.config.patch(capture_scalar_outputs=True)  # a setting of users
def test_values_that_torch_captures():
    def function(table, x, k):
        return table.select(0, k.item()) * 2, table.narrow(1, k, 1) * 2

    found, expected = calls(function, TorchParts(), (2, 3, 1), torch.int64)
    assert all(map(torch.equal, found, expected))


@torch.no_grad()
def test_other_values_that_torch_asks_for():
    compiled, x = TorchParts().compiled(lambda x, k: x.roll(k) * 2), torch.randn(9)
    with pytest.warns(qcore.QcoreWarning, match="asks a tensor for its value"):
        y = compiled(x, torch.tensor(3))
    assert torch.equal(y, x.roll(3) * 2)
