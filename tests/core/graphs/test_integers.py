"""Python integers that change from call to call: results as of torch, and no program for each value."""

import contextlib
import copy
import warnings

import pytest
import torch
from graph_backends import TorchParts
from torch import nn

import qcore
from qcore.graphs import explain

pytestmark = pytest.mark.usefixtures("fresh_compiler")
TABLE, INTEGERS = torch.randn(9, 4, 9), torch.arange(18).view(2, 9)


def arithmetic(x, i, n):
    y = i + n - (n - 3) * x.round() / (n + 1)
    return y, n - i, i * n, i // n, i % n, x.add(n), torch.mul(n, x), i.to(torch.int32) + n


def comparisons(x, i, n):
    return i < n, i == n, i >= n, x > n


def operators(x, i, n):
    """Each on either side."""
    y, z, u, v, one = x.clone(), i.clone(), i.clone(), x.clone(), i.abs() + 1
    y /= n
    z //= n
    u %= n
    v -= n
    first = n + x, n - x, n * x, n / x, n // one, n % one, n == i, n != i, n < i, n <= x, n > x, n >= i
    return y, z, u, v, *first, x / n, i / n, i // n, i % n, x - n, i != n, torch.rsub(x, n), torch.rsub(i, n)


def choices(x, i, n):
    return torch.where(i < n, x, n), torch.where(x > 0, n, i)


def own_tensors(x, i, n):
    made = torch.tensor(n), torch.tensor([n, 3, n + 1]), torch.scalar_tensor(n)
    filled = torch.full((2, 1), n), torch.full((2,), n, dtype=torch.float32), x.new_full((3,), n)
    made[0].add_(1)
    return *made, *filled, torch.arange(n, n + 3), torch.arange(n - 1, n, dtype=torch.int32)


def in_place(x, i, n):
    y, z = x.clone(), i.clone()
    y += n
    z *= n
    y.sub_(n + 1)
    z.add_(n)
    return y, z


def reads(x, i, n):
    table = x.sum() + TABLE
    parts = table[n : n + 2], table[:, :, n - 1 : n + 1], table[..., None, n : n + 1], table[:, None, :, n - 2 : n]
    return [part * 2 for part in (*parts, table.narrow(2, n, 2), table.select(0, n), table[n])]


def writes(x, i, n):
    y, z, u = torch.zeros(9, 2, 9), torch.zeros(9, 9), torch.zeros(9, 9, dtype=torch.int64)
    y[:, :, n : n + 2] = x[:, :2, None].expand(2, 2, 2).sum(0)
    y[n] = 1.5
    z[n : n + 1] = i[0]
    z[n - 1] = x.sum()
    u[n : n + 2, :] = True
    return y, z, u


def constants(x, i, n):
    """Those of which Dynamo itself makes a constant, and what has a step or another slice beside it."""
    y = torch.zeros(9, 9)
    z = torch.where(i < n, n, 1) + torch.where(i > n, 0.5, n)
    y[..., n] = 1.0
    y[n : n + 2, 1:3] = 2.0
    return (
        n >= i,
        TABLE[None, n],
        TABLE[:, None, :, n],
        TABLE[n : n + 3 : 2],
        TABLE[:, 1:, n : n + 1],
        torch.as_tensor(n),
        y,
        z,
    )


def views(x, i, n):
    """What may not become copies: parts that are written through, and parts of what is written later."""
    y, z = x.clone(), x.clone()
    y[:, n : n + 1].mul_(2)
    part = z[:, n : n + 2]
    z += 1
    return y, part * 2


EVERY = [arithmetic, comparisons, operators, choices, own_tensors, in_place, reads, writes]


def outputs_of(function, numbers, backend):
    """The results of calls with other numbers, with their expected ones."""
    compiled = backend.compiled(function)
    x, found, expected = torch.randn(2, 9), [], []
    with torch.no_grad():
        for n in numbers:
            found += compiled(x, INTEGERS, n)
            expected += function(x, INTEGERS, n)
    return found, expected


@pytest.mark.parametrize("function", [*EVERY, constants, views])
@pytest.mark.parametrize("numbers", [(2, 3, 4, 7, 5), (-3, -4, -6, -5)])
def test_results_are_those_of_torch(function, numbers):
    backend = TorchParts()
    with warnings.catch_warnings():
        warnings.simplefilter("error", qcore.QcoreWarning)
        found, expected = outputs_of(function, numbers, backend)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.dtype == theirs.dtype


@pytest.mark.parametrize("mode", [contextlib.nullcontext(), torch.device("cpu")], ids=["plain", "mode"])
@pytest.mark.parametrize("function", EVERY)
def test_one_program_for_all(function, mode):
    """Beside that of the first number, which Dynamo takes for a constant; under a mode it records methods."""
    if function in {comparisons, operators} and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13 Dynamo makes a constant of a number that is compared with a tensor")
    backend = TorchParts()
    with mode:
        outputs_of(function, (2, 3, 4, 5), backend)
    assert len(backend.parts) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.int32])
def test_dtypes_that_a_tensor_would_change(dtype):
    """A number never changes a tensor's dtype, a tensor without dimensions does beside another one."""

    def function(x, i, n):
        y = x.to(dtype)
        return y + n, y[0, 0] + n, y * n, torch.where(x > 0, y, n), torch.tensor(n, dtype=dtype) + y

    found, expected = outputs_of(function, (2, 3, 4), TorchParts())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.dtype == theirs.dtype


def own_views(x, i, n):
    return x[:, n : n + 1], x.select(0, 0 * n), x.narrow(1, n, 2)[None]


@torch.no_grad()
def test_parts_that_are_returned_are_views():
    compiled, x = TorchParts().compiled(own_views), torch.randn(2, 9)
    for n in (2, 3, 4):
        for mine, theirs in zip(compiled(x, INTEGERS, n), own_views(x, INTEGERS, n), strict=True):
            assert mine.data_ptr() == theirs.data_ptr()
            assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("function", [
    lambda y: y.__imul__(3), lambda y: torch._foreach_add_([y], 1), lambda y: nn.functional.relu(y, True),
    lambda y: nn.functional.batch_norm(torch.arange(27.0).view(3, 9), y[0], y[1].abs(), training=True),
    lambda y: [one.zero_() for one in y.unbind()], lambda y: y.data.view(-1)[3:].add_(1),
    lambda y: torch.utils.checkpoint.checkpoint(lambda z: z.add_(1) * 2, y, use_reentrant=False),
    lambda y: torch.add(y, 1, out=y), lambda y: torch.ops.aten.add_(y, 1),
    lambda y: y.as_strided((2,), (1,), 3).zero_(),
])  # fmt: skip
def test_whatever_writes_is_seen(function):
    def reading(x, i, n):
        y = x * 2
        part = y[:, n : n + 1]
        function(y)
        return part * 1, y

    found, expected = outputs_of(reading, (2, 3, 4), TorchParts())
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_bits_are_written_in_place_as_well():
    def reading(x, i, n):
        y = x > 0
        part = y[:, n : n + 1]
        y |= i > n
        return (part.clone(),)

    found, expected = outputs_of(reading, (2, 3, 4), TorchParts())
    assert all(map(torch.equal, found, expected))


@torch.no_grad()
def test_arguments_that_overlap_in_a_later_call():
    def function(a, b, n):
        part = a[n : n + 1]
        b.add_(1)
        return part * 2

    compiled, memory = TorchParts().compiled(function), torch.randn(90)
    for n in (2, 3, 4):
        compiled(torch.randn(9, 9), torch.randn(9, 9), n)
    a, b = memory[:81].view(9, 9), memory[9:].view(9, 9)
    other = memory.clone()
    with pytest.warns(qcore.QcoreWarning, match="share memory"):
        found = compiled(a, b, 5)
    assert torch.equal(found, function(other[:81].view(9, 9), other[9:].view(9, 9), 5))
    assert torch.equal(memory, other)


def test_numbers_that_come_first():
    def function(x, i, n):
        total = n
        total += i[0, 3]
        scaled = n
        scaled *= x
        return n / x, n / i[:, 1:], total, scaled, n + i

    backend = TorchParts()
    found, expected = outputs_of(function, (2, 3, 7, 11), backend)
    assert all(map(torch.equal, found, expected))
    assert len(backend.parts) == 2


def test_arguments_by_name_and_tensors_without_dimensions():
    def function(x, i, n):
        low = i.to(torch.int32)
        made = torch.full(size=(2, 1), fill_value=n), torch.full((), n, dtype=torch.int32), low.new_full((), n)
        return *made, torch.full((3,), fill_value=n, dtype=torch.float32), torch.tensor(data=1) + i

    backend = TorchParts()
    found, expected = outputs_of(function, (2, 3, 4), backend)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    assert len(backend.parts) == 2


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:torch_parts. this call runs in torch:qcore.QcoreWarning")
def test_numbers_that_a_dtype_does_not_hold():
    compiled = TorchParts().compiled(lambda n: torch.full((2,), n, dtype=torch.int32) + 0)
    for n in (2, 3, 2**31 - 1):
        assert compiled(n).tolist() == [n, n]
    with pytest.raises(RuntimeError, match="overflow"):
        compiled(2**31)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_dtypes_that_no_index_selects(dtype):
    def function(x, i, n):
        y = x.abs().to(dtype).T.contiguous()
        y[n : n + 1] = y[0]
        y[n + 1] = y[1, None]
        return (y.to(torch.complex64),)

    found, expected = outputs_of(function, (2, 3, 4), TorchParts())
    assert all(map(torch.equal, found, expected))


def test_memory_that_is_turned_keeps_its_order():
    def function(x, i, n):
        y = x.T.contiguous().T.clone()
        y[:, n] = 1.0
        return x.T[n : n + 2] * 2, (x.T[n : n + 2] * 2).T.view(-1), 2 / y, y

    with warnings.catch_warnings():
        warnings.simplefilter("error", qcore.QcoreWarning)
        found, expected = outputs_of(function, (2, 3, 4), TorchParts())
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()


@pytest.mark.filterwarnings("ignore:.*this graph computes gradients within:qcore.QcoreWarning")
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_numbers_within_transforms(transform):
    def function(x, i, n):
        def inner(row):
            return (row[..., n : n + 2] * n + row.select(-1, n)[..., None]).sum()

        return (transform(inner)(x),)

    found, expected = outputs_of(function, (2, 3, 4), TorchParts())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@torch.compiler.allow_in_graph
def add(x, n):
    return torch.zeros(n) + x.sum()


def test_functions_with_the_names_of_ops():
    found, expected = outputs_of(lambda x, i, n: (add(x, n), i + n), (2, 3, 4), TorchParts())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_sizes_stay_constants():
    def function(x, i, n):
        return x[:, :n] * n, torch.arange(n) + n, torch.zeros(n, 2)

    backend = TorchParts()
    found, expected = outputs_of(function, (2, 3, 4, 5), backend)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert len(backend.parts) == 4


@pytest.mark.filterwarnings("ignore:torch_parts. this call runs in torch:qcore.QcoreWarning")
def test_numbers_out_of_range_are_errors_as_in_torch():
    compiled, x = TorchParts().compiled(reads), torch.randn(2, 9)
    with torch.no_grad():
        for n in (2, 3, 4):
            compiled(x, INTEGERS, n)
        for n in (9, 20, -12):
            with pytest.raises((IndexError, RuntimeError)):
                compiled(x, INTEGERS, n)


def test_slices_up_to_the_end_are_not_those_from_it():
    """With -2, ``TABLE[n : n + 2]`` is empty, and torch 2.9 takes it for the same graph in writes."""

    def ends(x, i, n):
        y = torch.zeros(9, 9)
        y[n : n + 2] = x.sum()
        return TABLE[n : n + 2] + 1, y

    for numbers in ((-3, -4, -5, -2, 2), (2, 3, 4, -2, -4)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch_parts: this call runs in torch: an integer is an index")
            found, expected = outputs_of(ends, numbers, TorchParts())
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs)


def test_graphs_that_run_in_torch_have_their_numbers():
    backend = TorchParts(fails=True)
    with pytest.warns(qcore.QcoreWarning, match="on fire"):
        found, expected = outputs_of(arithmetic, (2, 3, 4, 5), backend)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


class Step(nn.Module):
    """A decoder's attention over a cache of fixed length, with the position as a Python integer."""

    def __init__(self):
        super().__init__()
        self.project, self.turn = nn.Linear(8, 24), nn.Parameter(torch.randn(16, 8))
        self.register_buffer("keys", torch.zeros(1, 16, 8))
        self.register_buffer("values", torch.zeros(1, 16, 8))

    def forward(self, x, position):
        query, key, value = self.project(x).chunk(3, -1)
        self.keys[:, position : position + 1] = key * self.turn[position]
        self.values[:, position : position + 1] = value
        mask = torch.arange(16) <= position
        return nn.functional.scaled_dot_product_attention(query, self.keys, self.values, mask[None, None])


@torch.no_grad()
def test_a_cache_with_positions_as_integers():
    torch.manual_seed(0)
    model, backend = Step().eval(), TorchParts()
    qcore.quantize_(model, "w8a16")
    other, compiled = copy.deepcopy(model), backend.compiled(model)
    for position in range(8):
        x = torch.randn(1, 1, 8)
        torch.testing.assert_close(compiled(x, position), other(x, position))
    torch.testing.assert_close(model.keys, other.keys)
    assert len(backend.parts) == 2
    assert not explain(model).host
    assert explain(model).reports[-1].states == 2


@torch.no_grad()
def test_many_programs_of_one_graph_are_warned_of():
    compiled = TorchParts().compiled(lambda x, n: x[:n] * 2, dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", qcore.QcoreWarning)
        for n in range(2, 17):
            compiled(torch.ones(40), n)
    with pytest.warns(qcore.QcoreWarning, match="compiled for 16 values of l_n_, each"):
        compiled(torch.ones(40), 17)
    with warnings.catch_warnings():
        warnings.simplefilter("error", qcore.QcoreWarning)
        compiled(torch.ones(40), 18)
