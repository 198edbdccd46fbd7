"""Calls of a compiled model that are repeated without Dynamo."""

import copy
import pickle
import random
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from graph_backends import TorchParts
from torch import nn

import qcore
from qcore.graphs import make_replay


class Cached(nn.Module):
    """A quantized layer, and a buffer that it writes to."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0
        self.register_buffer("cache", torch.zeros(5, 8))
        qcore.quantize_(self, "w8a16")

    def forward(self, x, place, scale=1.0):
        y = self.layer(x) * scale
        self.cache.index_copy_(0, place, y)
        return {"y": y, "sums": (self.cache.sum(0), self.cache)}


@pytest.fixture(autouse=True)
def no_grad():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def twins(kind, *args):
    torch.manual_seed(0)
    model = kind(*args).eval()
    torch.manual_seed(0)
    return model, kind(*args).eval()


def test_a_replay_computes_what_the_model_does():
    model, other = twins(Cached)
    compiled = TorchParts().compiled(model)
    draw, place = (lambda: torch.randn(1, 8)), torch.tensor([0])
    first = [(draw(), place), (draw(), place + 1)]
    compiled(*first[0], scale=2.0)
    replay = make_replay(compiled, *first[1], scale=2.0)
    expected = [other(*args, scale=2.0) for args in first][-1]
    torch.testing.assert_close(replay.result["y"], expected["y"])
    for i in (3, 2, 4):
        x = draw()
        found, expected = replay(x, torch.tensor([i]), scale=2.0), other(x, torch.tensor([i]), scale=2.0)
        torch.testing.assert_close(found["y"], expected["y"])
        torch.testing.assert_close(found["sums"][0], expected["sums"][0])
        assert found["sums"][1] is model.cache
        torch.testing.assert_close(model.cache, other.cache)
    model.cache.zero_()  # what torch writes is seen
    x = draw()
    assert torch.equal(replay(x, place, scale=2.0)["sums"][0], model.cache[0])


def test_it_runs_the_graph_alone(monkeypatch):
    model, _ = twins(Cached)
    backend = TorchParts()
    compiled, args = backend.compiled(model), (torch.randn(1, 8), torch.tensor([1]))
    compiled(*args)
    replay = make_replay(compiled, *args)
    monkeypatch.setattr(Cached, "forward", lambda *_: pytest.fail("the model was called"))
    replay(*args)
    assert len(backend.parts) == 1


def test_methods_have_replays():
    model, other = twins(Cached)
    compiled = TorchParts().compiled(model.forward)
    args = (torch.randn(1, 8), torch.tensor([1]))
    compiled(*args)
    torch.testing.assert_close(make_replay(compiled, *args)(*args)["y"], other(*args)["y"])


def test_functions_have_none():
    model, _ = twins(Cached)
    compiled = TorchParts().compiled(lambda x: model.layer(x) * 2)
    for one in (compiled, model, lambda x: compiled(-x)):
        with pytest.raises(qcore.UnsupportedError, match=r"of what torch\.compile made of a module"):
            make_replay(one, torch.randn(1, 8))


@pytest.mark.parametrize(("args", "kwargs", "said"), [
    ((torch.zeros(2, 8), torch.tensor([1])), {"scale": 2.0}, r"argument 0 .* shape \(1, 8\), .*float32, on cpu"),
    ((torch.zeros(1, 8), torch.tensor([1.0])), {"scale": 2.0}, "argument 1 .* torch.int64"),
    ((torch.zeros(1, 8), 1), {"scale": 2.0}, "argument 1 has to be a plain tensor"),
    ((torch.zeros(1, 8), torch.tensor([1])), {"scale": 3.0}, "argument 'scale' is another"),
    ((torch.zeros(1, 8), torch.tensor([1])), {"scale": 2}, "argument 'scale' is another"),
    ((torch.zeros(1, 8), torch.tensor([1])), {}, r"had 2 positional arguments and \['scale'\]"),
    ((torch.zeros(1, 8),), {"scale": 2.0}, "this one has 1"),
])  # fmt: skip
def test_other_arguments_are_errors(args, kwargs, said):
    model, _ = twins(Cached)
    compiled, own = TorchParts().compiled(model), (torch.randn(1, 8), torch.tensor([1]))
    compiled(*own, scale=2.0)
    replay = make_replay(compiled, *own, scale=2.0)
    with pytest.raises(ValueError, match=said):
        replay(*args, **kwargs)


class Counting(Cached):
    def forward(self, x, place):
        self.calls += 1
        return super().forward(x, place)


class Slotted(Cached):
    """Its count is where no __dict__ is."""

    class Count:
        __slots__ = ("calls",)

        def __init__(self):
            self.calls = 0

    def __init__(self):
        super().__init__()
        self.count = self.Count()

    def forward(self, x, place):
        self.count.calls += 1
        return super().forward(x, place)


class Keeping(Cached):
    def forward(self, x, place):
        self.last = x
        return super().forward(x, place)


class Asking(Cached):
    def forward(self, x, place):
        y = self.layer(x) + place
        return y if y.sum() > 0 else -y


class Number(Cached):
    def forward(self, x, place):
        y = self.layer(x) + place
        return y, y.sum().item()


class Passing(Cached):
    def forward(self, x, place):
        return self.layer(x) + place, x


class Growing(Cached):
    def forward(self, x, place):
        self.kept = self.layer(x)
        return self.kept + 1


class Broken(Cached):
    def forward(self, x, place):
        y = self.layer(x)
        torch._dynamo.graph_break()
        return self.layer(y)


@torch._dynamo.disable
def in_torch(x):
    return x + 1


class Afterwards(Cached):
    def forward(self, x, place):
        return in_torch(super().forward(x, place)["y"])


@dataclass
class Result:
    y: torch.Tensor


class Hidden(Cached):
    def forward(self, x, place):
        return Result(self.layer(x) + place)


class Unused(Cached):
    def forward(self, x, place):
        return self.layer(x)


@pytest.mark.parametrize(("kind", "said"), [
    (Counting, r"would not change the model\.calls"), (Growing, r"would not change the model\.kept"),
    (Slotted, "would not change the model.*calls"), (Keeping, r"the model\.last is an argument"),
    (Broken, "this call ran 2 graphs"), (Afterwards, "an object of <class 'torch.Tensor'>"),
    (Hidden, r"an object of <class.*Result|it writes .y."),
    (Asking, "not all this call does"), (Number, "not all this call does"),
    (Passing, "an object of <class 'torch.Tensor'>"), (Unused, "argument 1, .* has 0"),
])  # fmt: skip
def test_calls_that_do_more_are_refused(kind, said):
    model, _ = twins(kind)
    compiled, args = TorchParts().compiled(model), (torch.randn(1, 8), torch.tensor([1]))
    for _ in range(3):
        compiled(*args)
    with pytest.raises(qcore.UnsupportedError, match=said):
        make_replay(compiled, *args)


class Flag:
    """As transformers' CompileableContextVar: set for the time of a call."""

    def __init__(self):
        self.value, self.on, self.calls = None, False, 0


FLAG = Flag()


class Resetting(Cached):
    def forward(self, x, place):
        FLAG.on, FLAG.value = True, {}
        try:
            return super().forward(x, place)
        finally:
            FLAG.on, FLAG.value = False, None


FLAG.inner, FLAG.inner.inner = Flag(), None
TABLE, NAMES, FLAGS = {"calls": 0}, set(), [Flag()]


def toggle():
    FLAG.on = not FLAG.on


def toggle_inner():
    FLAG.inner.on = not FLAG.inner.on  # the outer object has an attribute of this name that stays


def tally():
    FLAG.calls += 1


def tally_inner():
    FLAG.inner.calls += 1


def tally_in_table():
    TABLE["calls"] += 1


def tally_in_list():
    FLAGS[0].calls += 1


def add_name():
    NAMES.add(len(NAMES))


class Changing(Cached):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x, place):
        self.change()
        return super().forward(x, place)


def test_attributes_that_are_as_before_at_the_end_are_no_writes():
    model, _ = twins(Resetting)
    compiled, args = TorchParts().compiled(model), (torch.randn(1, 8), torch.tensor([1]))
    compiled(*args)
    replay = make_replay(compiled, *args)
    other = torch.randn(1, 8), torch.tensor([2])
    assert torch.equal(replay(*other)["y"], compiled(*other)["y"])


@pytest.mark.parametrize(
    "change", [toggle, toggle_inner, tally, tally_inner, tally_in_table, tally_in_list, add_name]
)  # fmt: skip
def test_what_a_call_changes_by_name_is_seen(change):
    torch.manual_seed(0)
    model = Changing(change).eval()
    compiled, args = TorchParts().compiled(model), (torch.randn(1, 8), torch.tensor([1]))
    for _ in range(5):
        compiled(*args)
    with pytest.raises(qcore.UnsupportedError, match=r"is not all this call does: it (changes|writes) "):
        make_replay(compiled, *args)


def test_what_no_backend_has_compiled_is_refused():
    model, _ = twins(Cached)
    compiled, args = torch.compile(model, backend="eager"), (torch.randn(1, 8), torch.tensor([1]))
    compiled(*args)  # the first call of a kernel may change the model
    with pytest.raises(qcore.UnsupportedError, match="not compiled for a graph backend"):
        make_replay(compiled, *args)


def test_what_runs_in_torch_is_refused():
    model, _ = twins(Cached)
    compiled, args = TorchParts(fails=True).compiled(model), (torch.randn(1, 8), torch.tensor([1]))
    with pytest.warns(qcore.QcoreWarning, match="on fire"):
        compiled(*args)
    with pytest.raises(qcore.UnsupportedError, match=r"ran in torch.*on fire"):
        make_replay(compiled, *args)


class Preparing(Cached):
    """Its graph takes a tensor that torch makes at each call."""

    def forward(self, x, place):
        return self.layer(in_torch(x) + x) + place


def test_tensors_that_are_made_on_the_way_are_refused():
    """They would be those of the recorded call for ever."""
    model, _ = twins(Preparing)
    compiled, args = TorchParts().compiled(model), (torch.randn(1, 8), torch.tensor([1]))
    compiled(*args)
    with pytest.raises(qcore.UnsupportedError, match="not all this call does"):
        make_replay(compiled, *args)


def test_floats_that_models_differ_in_are_kept():
    """Dynamo passes them to the graph from the second model on, as tensors that it makes at each call."""
    for epsilon in (1e-5, 0.5, 2.0):
        model, other = twins(Normed, epsilon)
        compiled = TorchParts().compiled(model)
        compiled(torch.randn(2, 8))
        replay = make_replay(compiled, torch.randn(2, 8))
        x = torch.randn(2, 8)
        torch.testing.assert_close(replay(x), other(x))


class Normed(nn.Module):
    def __init__(self, epsilon):
        super().__init__()
        self.layer, self.epsilon = nn.Linear(8, 8), epsilon

    def forward(self, x):
        return self.layer(x) * torch.rsqrt(x.square().mean() + self.epsilon)


class Drawing(Normed):
    def forward(self, x):
        return super().forward(x) * random.uniform(0.0, 1.0)


def test_random_numbers_of_python_are_refused():
    model, _ = twins(Drawing, 1e-5)
    compiled, x = TorchParts().compiled(model), torch.randn(2, 8)
    compiled(x)
    with pytest.raises(qcore.UnsupportedError, match="random numbers of Python"):
        make_replay(compiled, x)


def test_arrays_of_numpy_are_refused():
    """They are other tensors at each call."""
    model, _ = twins(Scaled, 1e-5)
    compiled, x, scale = TorchParts().compiled(model), torch.randn(2, 8), np.array(2.0)
    compiled(x, scale)
    with pytest.raises(qcore.UnsupportedError, match="before the graph"):
        make_replay(compiled, x, scale)


class Scaled(Normed):
    def forward(self, x, scale):
        return super().forward(x) * torch.from_numpy(scale)


def test_hooks_around_the_model_are_refused():
    model, _ = twins(Cached)
    compiled, args = TorchParts().compiled(model), (torch.randn(1, 8), torch.tensor([1]))
    compiled(*args)
    compiled.register_forward_hook(lambda *_: None)
    with pytest.raises(qcore.UnsupportedError, match="which torch has not compiled"):
        make_replay(compiled, *args)


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("own", torch.ones(4))

    def forward(self, a, b):
        a.add_(1)
        return a * 2 + b + self.own


def test_tensors_that_share_memory_are_errors():
    """What Dynamo saw apart, or as one, it compiled so."""
    model = Adding()
    compiled, both = TorchParts().compiled(model), torch.zeros(8)
    compiled(torch.zeros(4), torch.zeros(4))
    replay = make_replay(compiled, torch.zeros(4), torch.zeros(4))
    a, b = torch.full((4,), 3.0), torch.full((4,), 5.0)
    assert torch.equal(replay(a, b), torch.full((4,), 14.0))
    assert torch.equal(a, torch.full((4,), 4.0))
    for pair in ((a, a), (both[:4], both[:4]), (model.own, b), (a, model.own)):
        with pytest.raises(ValueError, match="may not share memory"):
            replay(*pair)
    compiled(a, a)
    with pytest.raises((ValueError, qcore.UnsupportedError), match=r"share memory|each to one place"):
        make_replay(compiled, a, a)
    compiled(a, model.own)
    with pytest.raises(qcore.UnsupportedError, match="is an argument of this call"):
        make_replay(compiled, a, model.own)


def test_other_forms_and_modes_are_errors():
    model, _ = twins(Cached)
    compiled, args = TorchParts().compiled(model), (torch.randn(1, 8), torch.tensor([1]))
    compiled(*args)
    replay = make_replay(compiled, *args)
    for x in (
        torch.randn(1, 16)[:, ::2],
        torch.randn(2, 8)[1:],
        nn.Parameter(args[0]),
        args[0].clone().requires_grad_(),
    ):
        with pytest.raises(ValueError, match="argument 0 has to be a plain tensor"):
            replay(x, args[1])
    with torch.autocast("cpu"), pytest.raises(ValueError, match="autocast"):
        replay(*args)
    with torch.enable_grad(), pytest.raises(qcore.UnsupportedError, match="no_grad"):
        make_replay(compiled, *args)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a replay belongs to one"):
            copied(replay)
    model.train()
    with pytest.raises(ValueError, match="or its mode"):
        replay(*args)
    model.eval()
    replay(*args)
    model.cache = torch.zeros(5, 8)
    with pytest.raises(ValueError, match="buffer of the model was replaced"):
        replay(*args)


def test_objects_among_the_arguments_stay_what_they_are():
    class Cache:
        def __init__(self):
            self.keys = torch.zeros(4, 8)

    class Reads(Cached):
        def forward(self, x, place, cache, pair):
            cache.keys.index_copy_(0, place, self.layer(x))
            return cache.keys.sum(0) + pair[0]

    model, other = twins(Reads)
    compiled, cache, twin, pair = TorchParts().compiled(model), Cache(), Cache(), [torch.ones(8)]
    args = torch.randn(1, 8), torch.tensor([2])
    compiled(*args, cache, pair)
    other(*args, twin, pair)
    replay = make_replay(compiled, *args, cache, pair)
    x = torch.randn(1, 8)
    torch.testing.assert_close(replay(x, torch.tensor([3]), cache, pair), other(x, torch.tensor([3]), twin, pair))
    with pytest.raises(ValueError, match="argument 2 is another"):
        replay(*args, twin, pair)
    kept, pair[0] = pair[0], torch.zeros(8)
    with pytest.raises(ValueError, match="argument 3 holds others"):
        replay(*args, cache, pair)
    pair[0] = kept
    replay(x, torch.tensor([3]), cache, pair)
    cache.keys = cache.keys.clone()
    with pytest.raises(ValueError, match="argument 2 holds others"):
        replay(*args, cache, pair)


def test_a_failed_call_records_nothing():
    model, _ = twins(Cached)
    compiled, args = TorchParts().compiled(model), (torch.randn(1, 8), torch.tensor([1]))
    compiled(*args)
    with pytest.raises(IndexError):
        make_replay(compiled, args[0], torch.tensor([9]))
    make_replay(compiled, *args)


def test_snapshots_follow_containers_and_cycles():
    from qcore.graphs.snapshots import changes, snapshot

    one = types.SimpleNamespace(number=1, parts=[{"a": 2.0}, (True, None)], names={"x"}, tensor=torch.zeros(2))
    one.itself = one
    before = snapshot({"one": one})
    assert not list(changes(before, snapshot({"one": one})))
    one.tensor.add_(1)  # values are none of its business
    assert not list(changes(before, snapshot({"one": one})))
    one.parts[0]["a"], one.names, one.tensor = 3.0, {"x", "y"}, one.tensor.clone()
    found = set(changes(before, snapshot({"one": one})))
    assert {"one.parts[0]['a']", "one.tensor"} <= found
    assert any("names" in path for path in found)
    one.number = True
    assert "one.number" in set(changes(before, snapshot({"one": one})))
