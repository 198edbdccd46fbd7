"""Calls whose replay would not do all that they do."""

import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from graph_backends import TorchParts
from replayed_models import Cached, twins
from torch import nn

import qcore
from qcore.graphs import make_replay, noting


@pytest.fixture(autouse=True)
def no_grad():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


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


@pytest.mark.parametrize(("line", "found"), [
    ("FLAG.value = None", ""), ("FLAG.inner.value = None", ""), ("FLAG.on = x.value = None", "value"),
    ("x.on = 1", "on"),
])  # fmt: skip
def test_writes_in_code_that_names_hundreds_of_things(line, found):
    """An instruction whose argument exceeds a byte stands behind another that extends it."""
    scope, names = {}, "\n".join(f"    name_{i}" for i in range(300))
    exec(f"def call(x):\n{names}\n    {line}", scope)
    assert noting._of_code(scope["call"].__code__) == (found and f"it writes {found!r} (STORE_ATTR)")


def test_loops_and_pairs_of_later_pythons(monkeypatch):
    """Python 3.12 ends a loop by an instruction that uncovers what lies below; 3.13 has pairs of instructions."""
    effects = {
        "LOAD_GLOBAL": 1, "LOAD_FAST": 1, "GET_ITER": 0, "FOR_ITER": 1, "STORE_FAST": -1, "JUMP_BACKWARD": 0,
        "END_FOR": -2, "STORE_ATTR": -2, "STORE_FAST_LOAD_FAST": 0, "STORE_FAST_STORE_FAST": -2,
    }  # fmt: skip
    monkeypatch.setattr(noting.dis, "stack_effect", lambda opcode, _arg, *, jump: effects[opcode])
    monkeypatch.setattr(noting, "_JUMPS", {"FOR_ITER", "JUMP_BACKWARD"})

    def is_top_after(*names, targets=()):
        owners = noting._Owners()
        for i, name in enumerate(names):
            argval = dict(targets).get(i, "x")
            owners.follow(SimpleNamespace(opname=name, opcode=name, arg=0, argval=argval, offset=i))
        return owners.is_top()

    loop = ("GET_ITER", "FOR_ITER", "STORE_FAST", "JUMP_BACKWARD", "END_FOR")
    start = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_FAST")
    assert is_top_after(*start, *loop, targets=[(4, 7), (6, 4)])
    assert not is_top_after("LOAD_GLOBAL", "LOAD_FAST", "LOAD_FAST", *loop, targets=[(4, 7), (6, 4)])
    assert not is_top_after("LOAD_GLOBAL", "STORE_FAST_LOAD_FAST")
    assert is_top_after("LOAD_GLOBAL", "STORE_FAST", "LOAD_FAST")
    pairs = ("LOAD_FAST", "LOAD_FAST", "STORE_FAST_STORE_FAST")
    assert not is_top_after("LOAD_GLOBAL", "STORE_FAST", *pairs, "LOAD_FAST")


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
