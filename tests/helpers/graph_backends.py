"""A graph backend that runs parts in torch; `part_of`: an op as a part, without `torch.compile`; checks of backends."""

from __future__ import annotations

import operator

import torch
from tiny_models import Counter
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import qcore
from qcore.graphs import GraphBackend, Input, Part, Role, base_name, torch_compile_backend
from qcore.graphs.ops import decompositions


class TorchParts(GraphBackend):
    """Runs each part as it is; ``refused``: names of ops that it does not run."""

    name = "torch_parts"

    def __init__(self, refused=(), recognized=(), fewest=1, fails=False):
        self.refused, self.recognized, self.fewest, self.fails = refused, recognized, fewest, fails
        self.parts = []

    def why_not(self, node):
        name = base_name(node.target)
        return f"no kernel for {name}" if name in self.refused else ""

    def recognizes(self):
        return frozenset(self.recognized)

    def fewest_nodes(self):
        return self.fewest

    def compile(self, part):
        if self.fails:
            raise ValueError("the device is on fire\nand more")
        self.parts.append(part)

        def run(values):
            assert len(values) == len(part.inputs)
            outputs = part.graph(*values)
            for place, at in part.updates.items():
                values[place].copy_(outputs[at])
            return [outputs[at] for at in part.returned]

        return run

    def compiled(self, model, **kwargs):
        """``torch.compile`` with this backend."""
        return torch.compile(model, backend=torch_compile_backend(self), **kwargs)


class KeepsStates(TorchParts):
    """Keeps states to itself: host memory holds NaN until it is asked for them."""

    name, defers_writes = "keeps_all", True

    def __init__(self):
        super().__init__()
        self.asked, self.kept = 0, {}

    def compile(self, part):
        self.parts.append(part)

        def run(values):
            known = [self.kept[id(one)][1] if torch.is_tensor(one) and one.isnan().all() else one for one in values]
            outputs = part.graph(*known)
            for place, at in part.updates.items():
                self.kept[id(values[place])] = values[place], outputs[at]
                values[place].fill_(torch.nan)
            return [outputs[at] for at in part.returned]

        return run

    def synchronize(self, tensors):
        for one in tensors:
            if id(one) in self.kept:
                one.copy_(self.kept.pop(id(one))[1])

    def synchronize_all(self):
        found, self.asked = [one for one, _ in self.kept.values()], self.asked + 1
        self.synchronize(found)
        return bool(found)


def part_of(function, *args):
    """``function`` of tensors, decomposed to the op list, as a part whose inputs are all fresh."""
    module = make_fx(function, decomposition_table=decompositions())(*args)
    output = module.graph.output_node()
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
        module.recompile()
    places = module.graph.find_nodes(op="placeholder")
    given = tuple(Input(place.name, Role.FRESH, place.meta["val"]) for place in places)
    device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
    return Part(module, given, {}, device)


def part_of_call(function, args, dtype=None):
    """A call whose tensors become inputs of a part: the part, these tensors, its nodes but for `getitem`, the result.

    ``dtype``: of the tensors of floats among ``args``.
    """
    args = tuple(a.to(dtype) if dtype and isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    tensors = [a for a in args if isinstance(a, Tensor)]

    def whole(*given):
        left = iter(given)
        return function(*(next(left) if isinstance(a, Tensor) else a for a in args))

    part = part_of(whole, *tensors)
    return part, tensors, [node for node in part.nodes if node.target is not operator.getitem], whole(*tensors)


def check_replaced_memory(backend, dtype):
    """A compiled model takes tensors whose ``data`` was replaced since its last call."""
    torch.manual_seed(0)
    quantized = qcore.nn.QuantizedLinear.from_float(nn.Linear(16, 8), "w8a16")
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), quantized, nn.BatchNorm1d(8)).eval().to(dtype)
    compiled, x = torch.compile(model, backend=backend), torch.randn(3, 8, dtype=dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(compiled(x), model(x), rtol=tolerance, atol=tolerance)
    for at, name in ((0, "weight"), (0, "bias"), (1, "weight"), (2, "bias"), (3, "running_var")):
        before, tensor = model(x), getattr(model[at], name)
        tensor.data = torch.randn_like(tensor).abs()
        torch.testing.assert_close(compiled(x), model(x), rtol=tolerance, atol=tolerance)
        assert not torch.equal(model(x), before)
    weight = model[0].weight
    for _ in range(3):  # the memory that was freed is given out again
        for _ in range(2):
            weight.data = weight.data * 2 - 1
        torch.testing.assert_close(compiled(x), model(x), rtol=tolerance, atol=tolerance)
        weight.data = torch.empty(0, dtype=dtype)
        weight.data = torch.randn(16, 8, dtype=dtype)
        torch.testing.assert_close(compiled(x), model(x), rtol=tolerance, atol=tolerance)


class Writes(nn.Module):
    """Calls without a result that is used: they write to a state, alone or before what runs in torch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 3))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x, at):
        self.cache.index_copy_(0, at, x * 2)
        self.count.add_(1)


def check_calls_that_only_write(backend, synchronize):
    """A compiled call that returns nothing, and one with a break after its writes, leave what torch leaves."""
    model, x = Writes(), torch.arange(3.0)[None] + 1
    compiled = torch.compile(model, backend=backend)

    def broken(x, at):
        model(x, at)
        torch._dynamo.graph_break()
        return x + 1

    for number, call in enumerate((compiled, compiled, torch.compile(broken, backend=backend))):
        call(x, torch.tensor([number]))
    synchronize(model)
    assert model.count.item() == 3
    assert torch.equal(model.cache[:3], (2 * x).expand(3, 3))


def check_counted(backend, count):
    """A compiled model that counts in a buffer: results, the buffer after each call, and after torch wrote to it."""
    model, step = Counter(count), torch.ones_like(count)
    compiled = torch.compile(model, backend=backend)
    for number in range(1, 4):
        torch.testing.assert_close(compiled(step), torch.full_like(count, 2 * number))
        torch.testing.assert_close(model.count, torch.full_like(count, number))
    model.count.zero_()
    torch.testing.assert_close(compiled(step), torch.full_like(count, 2))
