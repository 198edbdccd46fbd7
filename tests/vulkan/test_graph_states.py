"""Tensors that a whole model on a Vulkan device writes: buffers, caches, counters."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
from graph_backends import check_calls_that_only_write
from tiny_models import Counter
from torch import nn

import qcore
from qcore import graphs
from qcore_vulkan.graphs import program, residents, states
from qcore_vulkan.graphs.backend import qcore_vulkan

pytestmark = pytest.mark.usefixtures("fresh_compiler")


SHARED = torch.zeros(8)


@torch.no_grad()
@pytest.mark.parametrize(("count", "reason"), [
    (torch.zeros(3), ""), (torch.zeros(3, dtype=torch.int64), ""), (torch.zeros(3, dtype=torch.bfloat16), ""),
    (SHARED[2:5], "does not own"), (torch.zeros(2, 3).T, "does not own"),
])  # fmt: skip
def test_states(count, reason):
    assert reason in states.why_not(count)
    assert bool(reason) == bool(states.why_not(count))
    model, step = Counter(count), torch.ones_like(count)
    compiled = torch.compile(model, backend=qcore_vulkan)
    for number in range(1, 4):
        torch.testing.assert_close(compiled(step), torch.full_like(count, 2 * number))
    graphs.synchronize(model)
    torch.testing.assert_close(model.count, torch.full_like(count, 3))
    model.count.zero_()
    torch.testing.assert_close(compiled(step), torch.full_like(count, 2))


@torch.no_grad()
@pytest.mark.parametrize(("size", "behind"), [(1, False), (256, False), (257, True)])
def test_small_states_come_back_with_each_call(size, behind):
    model = Counter(torch.zeros(size, dtype=torch.int64))
    compiled = torch.compile(model, backend=qcore_vulkan)
    for number in range(1, 4):
        compiled(torch.ones_like(model.count))
        assert torch.equal(model.count, torch.full_like(model.count, number)) != behind
    model.count[0] = 9  # loses nothing
    compiled(torch.ones_like(model.count))
    if behind:
        graphs.synchronize(model)
    assert model.count.tolist() == [10, *[4] * (size - 1)]


@torch.no_grad()
def test_a_checkpoint_has_the_devices_values(tmp_path):
    model = Counter(torch.zeros(300))
    torch.compile(model, backend=qcore_vulkan)(torch.ones(300))
    qcore.save(model, tmp_path / "counter.safetensors")
    again = Counter(torch.zeros(300))
    qcore.load_(again, tmp_path / "counter.safetensors")
    assert torch.equal(again.count, torch.ones(300))


def test_a_state_of_inference_mode_is_copied():
    states._warn_of_inference.cache_clear()
    with torch.inference_mode():
        model = Counter(torch.zeros(3))
        compiled = torch.compile(model, backend=qcore_vulkan)
        with pytest.warns(qcore.QcoreWarning, match="copied to the device and back"):
            compiled(torch.ones(3))
        assert torch.equal(model.count, torch.ones(3))
        model.count.zero_()  # is not counted
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_weights_of_inference_mode_are_warned_of():
    residents._warn_of_uncounted_writes.cache_clear()
    with torch.inference_mode():
        model = nn.Linear(4, 4)
        compiled = torch.compile(model, backend=qcore_vulkan)
        with pytest.warns(qcore.QcoreWarning, match="Torch does not count writes"):
            y = compiled(torch.ones(4))
        torch.testing.assert_close(y, model(torch.ones(4)))
        compiled(torch.zeros(4))  # warned of once: warnings are errors here


@torch.no_grad()
def test_a_state_that_is_viewed_is_copied():
    count = torch.zeros(3)
    view = count[:2]
    compiled = torch.compile(Counter(count), backend=qcore_vulkan)
    compiled(torch.ones(3))
    assert torch.equal(view, torch.ones(2))


class Exchange(nn.Module):
    """Two states that take each other's values, and the old one of the first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.arange(4.0))
        self.register_buffer("b", -torch.arange(4.0))

    def forward(self, x):
        old = self.a + 0
        a, b = self.a + x, self.b * 1
        self.a.copy_(b)
        self.b.copy_(a)
        return old, self.a[1:] * 1


@torch.no_grad()
def test_states_that_exchange_their_values():
    model = Exchange()
    other, compiled = copy.deepcopy(model), torch.compile(model, backend=qcore_vulkan)
    for step in range(3):
        for y, expected in zip(compiled(torch.tensor(step)), other(torch.tensor(step)), strict=True):
            torch.testing.assert_close(y, expected)
    graphs.synchronize(model)
    torch.testing.assert_close((model.a, model.b), (other.a, other.b))


@torch.no_grad()
def test_old_values_that_are_still_needed_are_kept():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(2, 4))

        def forward(self, x, at):
            before = self.cache[:, 1:3]
            self.cache.index_copy_(1, at, x)
            return before * 2 + self.cache[:, :2]

    model = Late()
    other, compiled = copy.deepcopy(model), torch.compile(model, backend=qcore_vulkan)
    for number in range(4):
        x, at = torch.full((2, 1), float(number + 1)), torch.tensor([number])
        torch.testing.assert_close(compiled(x, at), other(x, at))


@torch.no_grad()
def test_small_states_are_uploaded_together(device, monkeypatch):
    class Counters(nn.Module):
        def __init__(self):
            super().__init__()
            for name in "abc":
                self.register_buffer(name, torch.zeros(3))

        def forward(self, x):
            for one in (self.a, self.b, self.c):
                one.add_(x)
            return self.a + 2 * self.b + 4 * self.c

    model, x = Counters(), torch.tensor([1.0, 2.0, 3.0])
    monkeypatch.setattr(device, "description", replace(device.description, local_input=False))
    compiled = torch.compile(model, backend=qcore_vulkan)
    assert torch.equal(compiled(x), 7 * x)
    for changed, submissions in (("", 1), ("b", 1), ("ac", 2), ("abc", 2), ("ac", 2)):
        for name in changed:
            getattr(model, name).fill_(ord(name))
        graphs.synchronize(model)
        wanted = sum((1 << at) * (getattr(model, name) + x) for at, name in enumerate("abc"))
        before = device.stats().submissions
        assert torch.equal(compiled(x), wanted)
        assert device.stats().submissions == before + submissions


@torch.no_grad()
def test_memory_is_freed_with_the_model(device):
    gc.collect()
    before = device.stats()
    model = Counter(torch.zeros(3))
    torch.compile(model, backend=qcore_vulkan)(torch.ones(3))
    assert device.stats().buffers > before.buffers
    del model
    torch._dynamo.reset()
    gc.collect()
    assert (device.stats().buffers, device.stats().programs) == (before.buffers, before.programs)


@torch.no_grad()
def test_other_graphs_see_current_states():
    class Two(Counter):
        def look(self):
            return self.count * 3

    model = Two(torch.zeros(3))
    count, look = torch.compile(model, backend=qcore_vulkan), torch.compile(model.look, backend=qcore_vulkan)
    double = torch.compile(lambda x: x * 2, backend=qcore_vulkan)
    for number in range(1, 4):
        count(torch.ones(3))
        torch.testing.assert_close(look(), torch.full((3,), 3.0 * number))
        count(torch.zeros(3))
        torch.testing.assert_close(double(model.count), torch.full((3,), 2.0 * number))


@torch.no_grad()
def test_calls_that_only_write_run():
    check_calls_that_only_write(qcore_vulkan, graphs.synchronize)


@torch.no_grad()
def test_caches_that_are_replaced_are_freed(device):
    model = Counter(torch.zeros(1 << 16))
    compiled, x = torch.compile(model, backend=qcore_vulkan), torch.ones(1 << 16)
    sizes = []
    for _ in range(5):
        model.count = torch.zeros(1 << 16)
        compiled(x)
        gc.collect()
        sizes.append(device.stats().buffers)
    assert sizes[-1] == sizes[1]


class _Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, place, cache):
        cache.index_copy_(1, place, self.layer(x)[:, None])
        return cache.sum(1)


@torch.no_grad()
@pytest.mark.parametrize("within", ["fit_each", "a new stamp"])
def test_a_cache_may_die_during_a_call(within, monkeypatch):
    class Cycle:
        """What only the garbage collector frees."""

    compiled = torch.compile(_Cached().eval(), backend=qcore_vulkan, fullgraph=True)
    x, place = torch.randn(2, 4), torch.tensor([0])
    first, old, last = (torch.zeros(2, 8, 4) for _ in range(3))
    for cache in (first, old, last):
        compiled(x, place, cache)
    expected = compiled(x, place, last)
    ring = Cycle()
    ring.ring, ring.old = ring, old
    gc.disable()
    try:
        if within == "a new stamp":
            del first, cache  # what was seen is forgotten, so that the next call makes a new stamp
        del old, ring
        _collect_within(within, monkeypatch)
        for _ in range(3):
            torch.testing.assert_close(compiled(x, place, last), expected)
    finally:
        gc.enable()


def _collect_within(place, monkeypatch):
    plain = program.Stamp

    class Collecting(plain):
        def __init__(self, *tensors):
            super().__init__(*tensors)
            if place == "a new stamp" and tensors:
                gc.collect()

        @staticmethod
        def fit_each(stamps, tensors):
            if place == "fit_each":
                gc.collect()
            return plain.fit_each(stamps, tensors)

    monkeypatch.setattr(program, "Stamp", Collecting)
