"""Graph breaks and stances of torch.compile: what torch runs by itself sees what the device has written."""

import copy

import pytest
import torch
from torch import nn

from qcore import graphs

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore:keeps_all")]


@torch._dynamo.disable
def largest(cache):
    """Not recorded; its integer tells nothing of NaN that it has met."""
    return cache.argmax()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(8, 4))

    def written(self, x, position):
        y = self.linear(x)
        self.cache.index_copy_(0, position, y)
        return y


class Broken(Layer):
    """Torch reads the cache between two graphs."""

    def forward(self, x, position):
        y = self.written(x, position)
        return y * largest(self.cache)


class After(Layer):
    """As `Broken`, behind the last graph."""

    def forward(self, x, position):
        self.written(x, position)
        return largest(self.cache)


class Within(nn.Module):
    """Dynamo records nothing of `forward`, as a break is in its loop, and the rest of what `Broken` does ends in it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Rest() for _ in range(2))

    def forward(self, x, position):
        found = 0
        for layer in self.layers:
            x = layer(x, position)
            found = found + layer.cache.argmax()
        return x, found


class Around(nn.Module):
    """Calls a model in a loop with a break, and reads its cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, position):
        for _ in range(1):
            self.model(x, position)
            torch._dynamo.graph_break()
        return self.model.cache.argmax()


class Rest(Layer):
    def forward(self, x, position):
        torch._dynamo.graph_break()
        return self.written(x, position)


class Whole(Layer):
    def forward(self, x, position):
        return self.written(x, position) + self.cache.sum(0)


def check(compiled, model, calls=4):
    """Calls of a compiled copy of a model, beside the model."""
    for number in range(calls):
        x, position = torch.randn(1, 4), torch.tensor([number])
        torch.testing.assert_close(compiled(x, position), model(x, position))


def made(kind):
    torch.manual_seed(0)
    model = kind().eval()
    return model, copy.deepcopy(model)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Broken, After])
def test_what_follows_a_graph_break_sees_current_states(kind, backend):
    model, own = made(kind)
    with pytest.warns(match=r"comes back .*: there is a graph break at '.*largest\(self.cache\)'") as warned:
        check(backend.compiled(own), model)
    assert len(warned) == 1
    assert torch.equal(own.cache, model.cache)
    assert "states come back with each call: there is a graph break at" in str(graphs.explain(own))


@torch.no_grad()
def test_a_function_that_is_left_to_torch_sees_current_states(backend):
    model, own = made(Within)
    with pytest.warns(match="a graph break within 'forward' leaves that to torch"):
        check(backend.compiled(own), model)


@torch.no_grad()
def test_a_model_compiled_alone_sees_current_states_in_another(backend):
    """Dynamo takes what it has compiled, and the backend is not asked again."""
    model, own = made(Whole)
    alone, around = backend.compiled(own), backend.compiled(Around(own))
    check(alone, model, 1)
    assert own.cache.isnan().all()
    x, position = torch.randn(1, 4), torch.tensor([1])
    assert torch.equal(around(x, position), Around(model)(x, position))


@torch.no_grad()
@pytest.mark.filterwarnings("error::qcore.QcoreWarning")
def test_states_of_a_whole_model_stay(backend):
    model, own = made(Whole)
    check(backend.compiled(own), model)
    assert own.cache.isnan().all()
    own.compile(backend=graphs.torch_compile_backend(backend))
    own.cache.copy_(model.cache)
    check(own, model)
    assert own.cache.isnan().all()
    assert not backend.asked
    assert "come back" not in str(graphs.explain(own))


@torch.no_grad()
@pytest.mark.filterwarnings("error::qcore.QcoreWarning")
def test_states_stay_where_compiled_layers_are_called_in_torch(backend):
    model, own = made(Whole)
    layer = backend.compiled(own)

    def outer(x, position):
        return layer(x, position) * 2

    for number in range(3):
        x, position = torch.randn(1, 4), torch.tensor([number])
        torch.testing.assert_close(outer(x, position), model(x, position) * 2)
    assert own.cache.isnan().all()


@torch.no_grad()
def test_calls_that_recompile_in_torch_see_current_states(backend):
    model, own = made(Whole)
    compiled = backend.compiled(own)
    check(compiled, model, 1)
    assert own.cache.isnan().all()
    with torch.compiler.set_stance("eager_on_recompile"):
        with pytest.warns(match="its stance is 'eager_on_recompile'"):
            check(compiled, model, 2)
        x, position = torch.randn(2, 4), torch.tensor([4, 5])  # a size that was not compiled
        torch.testing.assert_close(compiled(x, position), model(x, position))
        check(compiled, model)


@torch.no_grad()
def test_calls_before_torch_compiles_see_current_states(backend):
    model, own = made(Whole)
    read, expected = backend.compiled(lambda cache: cache.sum()), model.cache
    compiled = backend.compiled(own)
    with torch.compiler.set_stance("eager_then_compile"):
        with pytest.warns(match="its stance is 'eager_then_compile'"):
            check(compiled, model, 3)
        torch.testing.assert_close(read(own.cache), expected.sum())
