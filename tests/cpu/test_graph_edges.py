"""Programs of `qcore_cpu.graphs` at the edges: numbers, mixed dtypes, and states that are read as they change."""

import operator

import pytest
import torch
from graph_backends import part_of, part_of_call
from graph_edge_cases import EDGES, check_edge

from qcore.graphs import Input, Part, Role
from qcore_cpu import native

assert not native.fault()
from qcore_cpu.graphs import program, support  # noqa: E402 - the ops exist once the library is loaded
from qcore_cpu.graphs.backend import qcore_cpu  # noqa: E402

NAN, INF = float("nan"), float("inf")
aten, qcore_graph = torch.ops.aten, torch.ops.qcore_graph
STATE = torch.arange(12.0).view(4, 3)
SQUARE = torch.arange(9.0).view(3, 3)


def refusals(part):
    return [why for node in part.nodes if node.target is not operator.getitem and (why := support.why_not(node))]


def same(function, *args, tolerance=0.0):
    """A program gives what torch gives."""
    part, tensors, _, expected = part_of_call(function, args)
    assert not refusals(part)
    (y,) = program.Program(part)(tensors)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def program_of_states(function, states, *fresh):
    """A program of a function of states and other tensors, which returns one result and then what the states take."""
    part = part_of(function, *states, *fresh)
    taken = {i: i + 1 for i in range(len(states))}
    inputs = tuple(
        Input(one.name, Role.STATE, one.example, taken[i]) if i in taken else one for i, one in enumerate(part.inputs)
    )
    part = Part(part.graph, inputs, taken, part.device)
    assert not refusals(part)
    return program.Program(part)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", EDGES)
def test_edges(name):
    check_edge(qcore_cpu, *EDGES[name], tolerance=1e-5)


NUMBERS = torch.tensor([0, 1, -1, 257, 2049, 70001, 2**31 - 1, -(2**31), -9])
VALUES = torch.tensor([3.97, -0.5, INF, -INF, NAN, 1.164, 7.1, 17.47, -0.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "minimum"])
def test_integers_are_rounded_to_half_precision(name, dtype):
    op, x = getattr(aten, name), VALUES.to(dtype)
    for whole in (NUMBERS, NUMBERS.int(), torch.tensor(257), NUMBERS[3:6].view(3, 1), NUMBERS[5:6]):
        same(op, x, whole)
        same(op, whole, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("number", [0.17671, 1e6, NAN])
def test_single_numbers_of_other_dtypes(name, dtype, number):
    op, x = getattr(aten, name), VALUES.to(dtype)
    same(op, x, torch.tensor(number))
    same(op, torch.tensor(number), x)
    same(op, NUMBERS, torch.tensor(number, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [2, 0.3, -1])
def test_sums_of_multiples_are_rounded_once(alpha, dtype):
    torch.manual_seed(0)
    x, y = (torch.randn(1024) * 9).to(dtype), torch.randn(1024).to(dtype)  # the rest of vectors rounds twice in torch
    for first, second in ((x, y), (y, x), (x, x), (torch.full_like(x, torch.finfo(dtype).max), x)):
        same(lambda x, y: aten.add(x, y, alpha=alpha), first, second)
        same(lambda x, y: aten.sub(x, y, alpha=alpha), first, second)


def test_powers_of_a_number():
    same(lambda x: torch.pow(257, x), VALUES.bfloat16(), tolerance=8e-3)
    same(torch.pow, torch.tensor(257), VALUES.bfloat16(), tolerance=8e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("power", [0.5, -0.5, 2, 3, -1, 257, 0.3])
def test_powers_by_a_number(power, dtype):
    same(lambda x: x**power, VALUES.to(dtype), tolerance=1e-5 if dtype == torch.float32 else 8e-3)


def test_bounds_that_are_no_numbers():
    bound = torch.tensor([NAN, 1.0, -INF, NAN, 2.0, NAN, 0.0, 3.0, NAN])
    same(aten.clamp, VALUES, bound, bound.flip(0))
    same(aten.clamp, VALUES, bound)
    same(lambda x, y: aten.clamp(x, None, y), VALUES, bound)
    same(lambda x: aten.clamp(x, NAN, 3.0), VALUES)
    same(lambda x: aten.clamp(x, INF, -INF), VALUES)


@pytest.mark.parametrize("shape", [(), (1,), (3, 64)])
def test_norms_whose_weight_is_broadcast_are_torch(shape):
    part = part_of(lambda x, w: qcore_graph.rms_norm(x, w, 1e-6), torch.randn(3, 64), torch.ones(shape))
    assert "of this form" in " ".join(refusals(part))
    assert refusals(part_of(lambda x: qcore_graph.rms_norm(x, None, 1e-6), torch.tensor(2.0)))


def test_layer_norm_of_numbers_far_from_zero():
    torch.manual_seed(0)
    x = 1e4 + 1e-2 * torch.randn(5, 100)
    part, tensors, _, _ = part_of_call(lambda x: qcore_graph.layer_norm(x, None, None, 1e-9), (x,))
    expected = torch.nn.functional.layer_norm(x.double(), (100,), eps=1e-9)
    torch.testing.assert_close(program.Program(part)(tensors)[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_views_as_another_dtype_that_torch_reads():
    x, w = torch.randint(0, 1 << 30, (3, 4), dtype=torch.int32), torch.randn(5, 4)
    same(lambda x, w: qcore_graph.dense(x.view(torch.float32), w, None), x, w)
    same(lambda x, w: qcore_graph.dense((x + 1).view(torch.float32)[1:], w, None), x, w)
    wide = torch.randn(5, 8).bfloat16()
    same(lambda x, w: qcore_graph.dense(x.view(torch.bfloat16), w, None), x, wide)
    same(lambda x: x.view(torch.int64) + 1, torch.randn(3, 4))


def test_many_dimensions_are_moved():
    x = torch.randn(2, 3, 2, 2, 2, 2, 3, 2)
    same(lambda x: x.permute(0, 7, 2, 5, 4, 3, 1, 6), x)
    same(lambda x: x.permute(7, 6, 5, 4, 3, 2, 1, 0)[1:, 1], x)


@pytest.mark.parametrize(("function", "state", "fresh"), [
    (lambda s, i: (i, s.index_copy(0, i, s[:2])), STATE, [torch.tensor([1, 0])]),
    (lambda s, i: (i, s.index_copy(0, i, s[1:3])), STATE, [torch.tensor([2, 0])]),
    (lambda s, y: (y, s.index_copy(0, s[:3], y)), torch.tensor([2, 0, 1, 5]), [torch.tensor([9, 8, 7])]),
    (lambda s: (s[:1], s.t()), SQUARE.t(), []),
    (lambda s: (s[:1], s.reshape(9).view(3, 3)), SQUARE.t(), []),
    (lambda s, i: (s[1:], s.index_copy(0, i, s[:1] * 2)), STATE, [torch.tensor([3])]),
])  # fmt: skip
def test_states_that_are_read_as_they_change(function, state, fresh):
    expected = [one.clone() for one in function(state, *fresh)]
    own = torch.empty_strided(state.shape, state.stride(), dtype=state.dtype).copy_(state)
    (y,) = program_of_states(function, [state], *fresh)([own, *fresh])
    torch.testing.assert_close([y, own], expected, rtol=0, atol=0)


def test_parts_of_a_state_that_are_taken_later():
    y = torch.ones(1, 3)

    def function(state, at, y):
        first, _ = state.split_with_sizes((2, 2))
        return first * 2, state.index_copy(0, at, y)

    part = part_of(function, STATE, torch.tensor([0]), y)
    part.graph.graph.output_node().prepend(next(n for n in part.nodes if n.target is operator.getitem))
    scaled = next(node for node in part.nodes if node.target is aten.mul.Tensor)
    part.graph.graph.output_node().prepend(scaled)
    part.graph.recompile()
    state = Input(part.inputs[0].name, Role.STATE, part.inputs[0].example, 1)
    own = STATE.clone()
    made = program.Program(Part(part.graph, (state, *part.inputs[1:]), {0: 1}, part.device))
    torch.testing.assert_close(made([own, torch.tensor([0]), y])[0], STATE[:2] * 2)
    torch.testing.assert_close(own, STATE.index_copy(0, torch.tensor([0]), y))


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
def test_a_cache_whose_entries_are_moved():
    class Beams(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", STATE.clone())

        def forward(self, at):
            self.cache.index_copy_(0, at, self.cache[:2].clone())
            return self.cache * 1

    model, expected = Beams(), Beams()
    compiled = torch.compile(model, backend=qcore_cpu)
    for at in ([1, 0], [2, 1], [0, 3]):
        torch.testing.assert_close(compiled(torch.tensor(at)), expected(torch.tensor(at)), rtol=0, atol=0)
    torch.testing.assert_close(model.cache, expected.cache, rtol=0, atol=0)


def test_another_default_device():
    part, tensors, _, expected = part_of_call(lambda x: torch.nn.functional.silu(x.mT) + 0.1, (STATE,))
    with torch.device("meta"):
        (y,) = program.Program(part)(tensors)
    torch.testing.assert_close(y, expected)


def test_a_call_while_another_thread_takes_the_memory():
    class Taken(list):
        def __bool__(self):
            return True  # as it was when it was asked

    part, tensors, _, expected = part_of_call(lambda x: x * 2, (STATE,))
    made = program.Program(part)
    made._rooms = Taken()
    torch.testing.assert_close(made(tensors)[0], expected)
