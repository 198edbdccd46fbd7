"""Calls of a compiled model that are repeated without Dynamo."""

import copy
import pickle
import types

import pytest
import torch
from graph_backends import TorchParts
from replayed_models import Cached, twins
from torch import nn

import qcore
from qcore.graphs import make_replay


@pytest.fixture(autouse=True)
def no_grad():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


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
