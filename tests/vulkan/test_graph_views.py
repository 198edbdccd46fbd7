"""Views without copies, and scratch memory with lifetimes: neither runs anything on a device."""

from itertools import pairwise

import pytest
import torch

from qcore_vulkan import native
from qcore_vulkan.builder import Builder, Ref
from qcore_vulkan.graphs.planner import Planner
from qcore_vulkan.graphs.views import bounds, expanded, overlaps, reshaped, reshaped_strides, squeezed
from qcore_vulkan.steps.operand import Operand


def operand(x):
    return Operand(Ref(native.ARENA, 0, 4 * x.untyped_storage().nbytes()), tuple(x.shape), x.stride(), torch.float32)


X = torch.arange(120).view(2, 3, 4, 5)
VIEWS = [
    X, X.permute(0, 2, 1, 3), X.permute(3, 2, 1, 0), X[:, 1:], X[:, :, ::2], X[:, :1], X[:1, :, :1].expand(7, 3, 4, 5),
    X[0, 0, 0, 0], X.mT, X[:, :, :, :1], X.permute(1, 0, 2, 3)[:1],
]  # fmt: skip
SHAPES = [(2, 3, 20), (6, 20), (120,), (2, 12, 5), (2, 3, 2, 2, 5), (24, 5), (1, 120, 1), (60,), (2, 2, 3, 5), (20, 3)]


@pytest.mark.parametrize(("view", "shape"), [
    (number, shape) for number, x in enumerate(VIEWS) for shape in SHAPES if x.numel() == torch.Size(shape).numel()
])  # fmt: skip
def test_reshaping_copies_where_torch_does(view, shape):
    x = VIEWS[view]
    strides = reshaped_strides(tuple(x.shape), x.stride(), shape)
    try:
        expected = x.view(shape)
    except RuntimeError:
        assert strides is None
        return
    assert strides is not None
    found = torch.as_strided(x, shape, strides, x.storage_offset())
    assert torch.equal(found, expected)
    assert reshaped(operand(x), shape).strides == strides


def test_expanding_and_squeezing():
    x = operand(X[:, :1])
    y = expanded(x, (4, 2, 3, -1, -1))
    assert (y.shape, y.strides) == ((4, 2, 3, 4, 5), X[:, :1].expand(4, 2, 3, -1, -1).stride())
    assert overlaps(y)
    assert not overlaps(x)
    assert squeezed(x, [1, 2]).shape == (2, 4, 5)
    assert squeezed(operand(torch.zeros(())), [0]).shape == ()


@pytest.mark.parametrize(("start", "end"), [(None, None), (-2, 100), (1, -1), (4, 2), (-9, 3), (7, 9)])
def test_bounds_of_a_slice(start, end):
    found = list(range(6))[start:end]
    first, last = bounds(6, start, end)
    assert list(range(6))[first:last] == found
    assert last - first == len(found)


@pytest.fixture
def planner():
    return Planner(None, small=0)  # allocates without a device


def freed(planner: Planner, *refs: Ref) -> None:
    for ref in refs:
        planner.free(ref)
    planner.waited()


def test_zeros_outlive_what_is_settled(planner):
    planner.scratch(100)
    mark = planner.mark()
    zeros = planner.zeros(64)
    planner.settle(mark, ())
    assert planner.zeros(256) == zeros
    planner.waited()
    assert planner.scratch(100).offset not in range(zeros.offset, zeros.offset + zeros.bytes)
    assert planner.zeros(257) != zeros


def test_zeros_of_memory_that_is_given_back():
    b = Builder(None)
    kept = b.zeros(4)
    mark = b.mark()
    b.rewind(mark)
    assert b.zeros(4) == kept
    b.rewind(0)
    b.scratch(4)
    assert b.zeros(4) != kept


def test_memory_is_used_again_once_it_is_free(planner):
    a, b, c = (planner.scratch(1000) for _ in range(3))
    assert [one.offset for one in (a, b, c)] == [0, 1024, 2048]
    freed(planner, b)
    assert planner.scratch(1025).offset == 3072  # does not fit into the hole
    assert planner.scratch(200).offset == 1024
    freed(planner, c)
    assert planner.scratch(1600).offset == 1280  # the rest of b's, and most of c's
    freed(planner, a)
    assert planner.scratch(1024).offset == 0
    assert planner._used[native.ARENA] == 3072 + 1280


def test_memory_is_not_used_again_before_a_step_waits(planner):
    a = planner.scratch(1000)
    planner.free(a)
    b = planner.scratch(1000)
    assert b.offset == 1024
    planner.waited()
    assert planner.scratch(1000).offset == a.offset


def test_small_ranges_are_not_given_away():
    planner = Planner(None, small=512)
    a, b, _ = (planner.scratch(size) for size in (512, 513, 1000))
    freed(planner, a, b)
    assert planner.scratch(300).offset == a.offset + 512
    assert planner.scratch(600).offset == b.offset


def test_small_ranges_lie_where_no_step_has_been():
    planner = Planner(None, small=512)
    large = planner.scratch(100_000)
    freed(planner, large)
    used = [(large.offset, large.offset + large.bytes)]
    for _ in range(200):  # more than are reserved at once
        small = planner.scratch(300)
        assert all(small.offset >= end or small.offset + small.bytes <= start for start, end in used)
        used.append((small.offset, small.offset + small.bytes))
    assert planner.scratch(100_000).offset == large.offset


def test_the_smallest_hole_is_taken(planner):
    a, _, c, _ = (planner.scratch(size) for size in (1024, 1, 512, 1))
    freed(planner, a, c)
    assert planner.scratch(512).offset == c.offset


def test_the_top_sinks(planner):
    refs = [planner.scratch(256) for _ in range(3)]
    freed(planner, refs[0], refs[2], refs[1])
    assert planner.scratch(4096).offset == 0
    assert planner._holes == []


def test_a_step_gives_back_what_it_does_not_return(planner):
    kept = planner.scratch(10)
    mark = planner.mark()
    result, other = planner.scratch(300), planner.scratch(300)
    inner = planner.mark()
    planner.scratch(5000)
    planner.rewind(inner)
    planner.settle(mark, [result])
    planner.waited()
    assert list(planner._made) == [kept.offset, result.offset]
    assert planner.scratch(300).offset == other.offset
    planner.free(Ref(native.OUTPUT, kept.offset, 4))  # no scratch memory
    assert kept.offset in planner._made


def test_ranges_never_overlap_and_are_all_given_back():
    generator, planner, living = torch.Generator().manual_seed(0), Planner(None, small=0), []
    for _ in range(600):
        if living and torch.rand((), generator=generator) < 0.5:
            planner.free(living.pop(int(torch.randint(len(living), (), generator=generator))))
            if torch.rand((), generator=generator) < 0.5:
                planner.waited()
        else:
            living.append(planner.scratch(int(torch.randint(1, 5000, (), generator=generator))))
        spans = sorted((ref.offset, ref.offset + ref.bytes) for ref in living)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    freed(planner, *living)
    assert (planner._holes, planner._top, planner._made) == ([], 0, {})
