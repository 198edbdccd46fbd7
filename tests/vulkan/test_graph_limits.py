"""States on a Vulkan device where torch runs code without it: past its limit of compilations, at graph breaks."""

import threading

import pytest
import torch
from torch import nn

from qcore import graphs
from qcore.graphs import capture
from qcore_vulkan.graphs.backend import VulkanGraphs, qcore_vulkan
from qcore_vulkan.graphs.sentinels import StaleValuesError

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:qcore_vulkan. what models write"),
]

SHAPE = 2, 300


class Window(nn.Module):
    """A cache that moves by one once it is full, which it tells by a number of Python, as those of transformers do."""

    def __init__(self, length=4):
        super().__init__()
        self.seen = 0
        self.register_buffer("cache", torch.zeros(length, 300))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        full = self.seen >= self.cache.shape[0]
        self.seen += 1
        if full:
            self.cache.copy_(torch.cat((self.cache[1:], x)))
        else:
            self.cache.index_copy_(0, self.place, x)
            self.place.add_(1)
        return self.cache.cumsum(0)


def started(shape=SHAPE):
    """A tensor whose values are on the device."""
    count = torch.zeros(shape)

    def add(count):
        count.add_(1)
        return count * 2

    torch.compile(add, backend=qcore_vulkan)(count)
    assert count.isnan().all()
    return count


def reach_limit():
    """Compile a function for the last time that torch does."""

    def scale(count, number):
        count.mul_(number)
        return count + 1

    count = torch.ones(SHAPE)
    with torch._dynamo.config.patch(recompile_limit=1):
        torch.compile(scale, backend=qcore_vulkan, dynamic=False)(count, 3)
    return count


def check_window(model, compiled, expected):
    """Fill the window, slide it, and begin anew, with a row that torch has written."""
    for number in range(10):
        x = torch.full((1, 300), number + 1.0)
        assert torch.equal(compiled(x), expected(x))
        if number == 8:
            for one in (model, expected):
                one.seen = 0
                one.place.zero_()
                one.cache[2] = 0


@torch.no_grad()
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_sliding_window_past_the_limit(limit):
    capture._warn_of_return.cache_clear()
    model, expected = Window(), Window()
    compiled = torch.compile(model, backend=qcore_vulkan, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=limit), pytest.warns(match="as often as its recompile_limit"):
        check_window(model, compiled, expected)
    graphs.synchronize(model)
    assert torch.equal(model.cache, expected.cache)


@torch._dynamo.disable
def largest(cache):
    """Not recorded; its integer tells nothing of NaN that it has met."""
    return cache.argmax()


class Broken(Window):
    """Torch reads the cache between two graphs."""

    def forward(self, x):
        self.cache.index_copy_(0, self.place, x)
        at = largest(self.cache)
        return self.cache * x + at


@torch.no_grad()
def test_what_follows_a_graph_break_sees_current_states():
    capture._warn_of_return.cache_clear()
    torch.manual_seed(0)
    model, expected = Broken(), Broken()
    compiled = torch.compile(model, backend=qcore_vulkan)
    for number in range(4):
        for one in (model, expected):
            one.place.fill_(number)
        x = torch.randn(1, 300)
        assert torch.equal(compiled(x), expected(x))
    assert torch.equal(model.cache, expected.cache)


@torch.no_grad()
def test_what_others_wrote_before_comes_back_at_the_limit():
    count = started()
    assert torch.equal(reach_limit(), torch.full(SHAPE, 3.0))
    assert torch.equal(count, torch.ones(SHAPE))
    assert not VulkanGraphs().synchronize_all()


@torch.no_grad()
def test_states_of_other_threads_are_left_to_them():
    made = []
    thread = threading.Thread(target=torch.no_grad()(lambda: made.append(started())))
    thread.start()
    thread.join()
    reach_limit()
    assert made[0].isnan().all()
    graphs.synchronize(made[0])
    assert torch.equal(made[0], torch.ones(SHAPE))


@torch.no_grad()
def test_stale_writes_are_errors_of_their_own_states_only():
    count, other = started(), started()
    count.mul_(2)
    other[1] = 7
    assert torch.equal(reach_limit(), torch.full(SHAPE, 3.0))
    assert torch.equal(other, torch.tensor([[1.0], [7.0]]).expand(SHAPE))
    with pytest.raises(StaleValuesError):
        graphs.synchronize(count)
