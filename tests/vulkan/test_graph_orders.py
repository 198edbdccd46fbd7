"""Sorting, flips and scatters in compiled graphs, against torch."""

import pytest
import torch
from graph_backends import part_of_call

import qcore
from qcore_vulkan.graphs import support
from qcore_vulkan.graphs.program import Program


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def places(most, *shape):
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(sum(shape)))


def reasons(function, *args):
    return [why for node in part_of_call(function, args)[2] if (why := support.why_not(node))]


def check(function, *args, tolerance=0.0):
    """The device computes what torch does."""
    part, tensors, called, _ = part_of_call(function, args)
    assert not [why for node in called if (why := support.why_not(node))]
    before = [x.clone() for x in tensors]
    found, expected = Program(part)(tensors), function(*args)
    for y, wanted in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert y.dtype == wanted.dtype
        torch.testing.assert_close(y, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(tensors, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 1000, 2048, 2049, 5000, 20000])
def test_sorting_is_stable(descending, count):
    x = (drawn(3, count) * 8).round()  # with many equal elements, and both zeros
    x[1, count // 2] = float("nan")
    x[2, count // 3] = float("-inf")
    check(lambda x: tuple(torch.sort(x, dim=-1, descending=descending, stable=True)), x)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_sorting_along_any_dimension(dim):
    x = drawn(5, 7, 6, 4)
    check(lambda x: tuple(x[:, ::2].mT.sort(dim)), x)
    check(lambda x: (x.argsort(dim), x.argsort(dim=dim, descending=True), x.msort()), x)
    check(lambda i: tuple(torch.sort(i, stable=True, dim=dim)), (x * 2).long())
    check(lambda b: tuple(torch.sort(b, dim=dim, descending=True, stable=True)), x > 0)
    check(lambda x: tuple(x[0, 0, 0, 0].sort()), x)


@pytest.mark.parametrize("dims", [(0,), (1,), (-1,), (0, 2), (0, 1, 2), ()])
def test_flips(dims):
    x = drawn(3, 5, 8)
    for one in (x, x > 0, (x * 5).long()):
        check(lambda x: (x.flip(dims), x[:, 1:].mT.flip(dims) * 1), one)
    check(lambda x: x[:1].expand(4, -1, -1).flip(dims), x)


@pytest.mark.parametrize(("shifts", "dims"), [(3, ()), (-1, 0), ((1, -2), (0, 2)), ((5, 7), (1, 1)), (0, 1)])
def test_rolls(shifts, dims):
    check(lambda x: x.roll(shifts, dims), drawn(3, 5, 8))


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")  # ATen's op is what is meant
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("shape", [(4, 5, 6), (3, 2, 6), (9, 1, 1)])
def test_scatters_of_elements(dim, shape):
    x, y = drawn(4, 5, 6), drawn(9, 5, 6)
    index = places(x.shape[dim], *(size if at == dim else min(size, x.shape[at]) for at, size in enumerate(shape)))
    check(lambda x, i, y: x.scatter(dim, i, y), x, index, y)
    check(lambda x, i: x.mT.contiguous().mT.scatter(dim, i, -2.5), x, index)
    check(lambda x, i, y: x.scatter_add(dim, i, y) + x, x, index, y, tolerance=1e-6)
    for name in ("add", "multiply"):
        check(lambda x, i, y, n=name: x.scatter(dim, i, y, reduce=n), x, index, y, tolerance=1e-6)
    check(lambda x, i, y: x.scatter(dim, i, y), (x * 5).long(), index, (y * 5).long())
    check(lambda x, i: x.scatter(dim, i, True), x > 0, index)


@pytest.mark.parametrize("name", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("own", [False, True])
def test_scatters_that_reduce(name, own):
    x, y, index = drawn(4, 6), drawn(9, 6), places(4, 9, 5)
    check(lambda x, i, y: x.scatter_reduce(0, i, y, name, include_self=own), x, index, y, tolerance=1e-6)
    check(lambda x, i, y: x.scatter_reduce(1, i[:4] % 2, y, name, include_self=own), x, index, y, tolerance=1e-6)
    y[3, 2] = float("nan")
    check(lambda x, i, y: x.scatter_reduce(0, i, y, name, include_self=own), x, index, y, tolerance=1e-6)


def test_scatters_of_scalars_and_of_views():
    x = drawn(2, 3, 2, 3, 2, 3)
    zero = torch.tensor(0)
    check(lambda x, i: x[0, 0, 0, 0, 0, 0].scatter_add(0, i, x[0, 0, 0, 0, 0, 1]), x, zero)
    index = places(3, 2, 4, 2, 3, 1, 3)
    y = drawn(3, 2, 3, 2, 4, 2).permute(5, 4, 3, 2, 1, 0)
    check(lambda x, i, y: x.transpose(0, 2).transpose(0, 2).scatter_add(1, i, y), x, index, y, tolerance=1e-6)


def test_sources_that_are_part_of_the_target():
    x, index, two = drawn(6, 4), places(6, 6, 4), torch.tensor([5, 1])
    check(lambda x, i: (y := x * 2).scatter(0, i, y), x, index)
    check(lambda x, i: (y := x * 2).scatter_reduce(0, i, y, "prod", include_self=False), x, index, tolerance=1e-6)
    check(lambda x, i: (y := x * 2).index_put((i,), y[:2]), x, two)
    check(lambda x, i: (y := x * 2).index_put((i,), y[:2], accumulate=True), x, two)
    check(lambda x, i: (y := x * 2).index_copy(0, i, y[4:]), x, two)
    check(lambda x: torch.slice_scatter(y := x * 2, y[:-1], 0, 1), x)
    check(lambda x: torch.slice_scatter(y := x * 2, y.flip(0)[:-1] * 1, 0, 1), x)


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_are_added(dim):
    x, rows = drawn(6, 7), drawn(11, 11)
    index = places(6, 11)
    source = rows[:, :7] if dim == 0 else rows[:6]
    check(lambda x, i, y: x.index_add(dim, i, y), x, index, source, tolerance=1e-6)
    check(lambda x, i, y: x.index_add(dim, i, y, alpha=-2), x, index, source, tolerance=1e-6)
    check(lambda x, i: x.index_fill(dim, i[:3], 4.0), x, index)


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put(accumulate):
    x, pairs = drawn(5, 6, 3), torch.tensor([[0, 2], [4, 3]])
    put = lambda x, i, y: torch.ops.aten.index_put(x, i, y, accumulate)  # noqa: E731
    check(lambda x, i: put(x, (i,), x[:2, :1, :1] * 3), x, pairs, tolerance=1e-6)
    check(lambda x, i: put(x, (i, i.mT), x[0, :2]), x, pairs[:, :1] * 1, tolerance=1e-6)
    check(lambda x, i: put(x, (None, i - 5), x[:, :2, None].expand(-1, -1, 2, -1)), x, pairs, tolerance=1e-6)
    check(lambda x, i: put(x.mT, (i[0], i[1] % 3), x[0, 0, 0]), x, pairs, tolerance=1e-6)


@pytest.mark.parametrize(("function", "reason"), [
    (lambda x, i: x.long().scatter_add(0, i, x.long()), "torch.int64 that reduce"),
    (lambda x, i: x.long().index_put((i[0],), x.long(), accumulate=True), "torch.int64 that accumulates"),
    (lambda x, i: x.to(torch.int8).scatter(0, i, x.to(torch.int8)), "torch.int8"),
    (lambda x, i: x.index_put((x > 9,), x[0, :0]), "mask|without elements"),
    (lambda x, i: x.to(torch.int8).sort()[0], "torch.int8"),
])  # fmt: skip
def test_refused(function, reason):
    found = reasons(function, drawn(4, 4), places(4, 4, 4))
    assert any(word in why for word in reason.split("|") for why in found), found


def test_an_index_out_of_range_is_an_error():
    part, tensors, _, _ = part_of_call(lambda x, i: x.scatter_add(0, i, x), (drawn(4, 3), places(4, 4, 3)))
    with pytest.raises(IndexError):
        Program(part)([tensors[0], tensors[1] + 4])


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_long_lines_on_any_profile(device, monkeypatch, profile):
    monkeypatch.setattr(device, "profile", profile)
    x, y, index = drawn(700), drawn(3000), places(700, 3000)
    check(lambda x, i, y: x.scatter_add(0, i, y), x, index, y, tolerance=1e-5)
    check(lambda y: tuple(y.sort()), y)


def test_memory_that_is_not_set_holds_no_large_integers():
    def places_of(order):
        inverse = torch.empty(6, dtype=torch.long)
        return inverse.index_put((order,), torch.arange(6))

    order = torch.tensor([3, 1, 5, 0, 2, 4])
    torch.use_deterministic_algorithms(True)  # fills such memory with the largest integers
    try:
        check(places_of, order)
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_index_without_dimensions():
    check(lambda x, i, s: (x * 2).scatter(0, i, s), drawn(6), torch.tensor(2), torch.tensor(5.0))


def test_rows_rotated_into_the_memory_they_come_from():
    class Moving(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", drawn(1, 2, 1024, 64))

        def forward(self, places, cos, sin):
            x = self.cache[:, :, :512]
            turned = torch.cat((-x[..., 32:], x[..., :32]), -1)
            self.cache.index_copy_(2, places, x * cos + turned * sin)
            return self.cache[:, :, :4].sum()

    model, whole = Moving(), Moving()
    args = (torch.arange(512).roll(-64), drawn(1, 1, 512, 64), drawn(1, 1, 512, 64).flip(2))
    torch._dynamo.reset()
    with torch.no_grad():
        model(*args)
        torch.compile(whole, backend="qcore_vulkan")(*args)
        qcore.graphs.synchronize(whole)
    torch.testing.assert_close(whole.cache, model.cache, rtol=1e-6, atol=1e-6)
