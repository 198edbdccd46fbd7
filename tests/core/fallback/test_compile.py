"""One graph for every number of rows: torch.compile, torch.export, custom ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grids import sampled
from torch._dynamo.testing import CompileCounterWithBackend

import qcore
from qcore.contracts import CONTRACTS
from qcore.formats import Format, ZeroPoint
from qcore.weights.schemes import Scheme

SCHEMES = ["w4a16-g32-asym", "w4a16-g32-fzp", "w8a16-asym", "w8a16", "w8a8", "w4a8-g32-asym-aasym", "w8a8-static-o8"]


def agrees(problem, result):
    verdict = CONTRACTS["linear"].judge(problem, result)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("scheme", sampled(SCHEMES, 3))
def test_traced(tools, scheme):
    made = tools.linear(scheme, torch.bfloat16, bias=True)
    for kernel in made.kernels.values():
        packed = kernel.pack(made.weight)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(kernel, fullgraph=True, dynamic=True, backend=counter)
        frames = set()
        for rows in (3, 5, 100):
            problem = made.problem(rows, bias="same")
            agrees(problem, compiled(problem.x, packed, problem.bias))
            frames.add(counter.frame_count)
        assert len(frames) == 1, f"{kernel.name} was compiled again for another number of rows"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # inductor's own, where it looks at oneDNN weights
@pytest.mark.parametrize(("scheme", "dtype"), sampled([("w4a16-g32-asym", torch.bfloat16), ("w8a8", torch.float32)], 1))
def test_compiled_by_inductor(tools, scheme, dtype):
    made = tools.linear(scheme, dtype, bias=True)
    for kernel in made.kernels.values():
        packed = kernel.pack(made.weight)
        torch._dynamo.reset()
        compiled = torch.compile(kernel, fullgraph=True, dynamic=True)
        for rows in (3, 1, 100):
            problem = made.problem(rows, bias="same")
            agrees(problem, compiled(problem.x, packed, problem.bias))


class Holder(torch.nn.Module):
    def __init__(self, kernel, packed):
        super().__init__()
        self.kernel, self.names = kernel, tuple(packed)
        for name, tensor in packed.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x, bias):
        return self.kernel(x, {name: self._buffers[name] for name in self.names}, bias)


@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w8a16", "w8a8", "w4a8-g32"])
def test_exported(tools, scheme):
    made = tools.linear(scheme, torch.bfloat16, bias=True)
    for kernel in made.kernels.values():
        module, problem = Holder(kernel, kernel.pack(made.weight)), made.problem(7, bias="same")
        rows = torch.export.Dim("rows")
        program = torch.export.export(module, (problem.x, problem.bias), dynamic_shapes=({0: rows}, None))
        for count in (7, 90):
            problem = made.problem(count, bias="same")
            agrees(problem, program.module()(problem.x, problem.bias))


@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w4a16-g32-fzp", "w4a16"])
def test_opcheck_of_the_int4_product(tools, scheme):
    made = tools.linear(scheme, torch.bfloat16)
    kernel = made.kernels["torch.cpu.w4a16"]
    packed = kernel.pack(made.weight)
    weight = (packed["weight"], packed["params"], packed.get("zero"), packed["scale"] if kernel.scale_after else None)
    arguments = (48, *weight, None, kernel.group, kernel.float_zero)
    for rows in (1, 90):
        x = torch.randn(rows, 256).bfloat16()
        torch.library.opcheck(torch.ops.qcore_torch.w4a16.default, (x, *arguments))


def test_opcheck_of_the_int8_product(tools):
    made = tools.linear("w8a16", torch.bfloat16)
    data, scale = made.weight.data, made.weight.scale
    for rows in (1, 90):
        x = torch.randn(rows, 256).bfloat16()
        for bias in (None, torch.randn(48)):
            torch.library.opcheck(torch.ops.qcore_torch.int8pack.default, (x, data, scale, bias))


LAYERS = [
    *(("linear", scheme, torch.float32) for scheme in ("w8a16", "w8a8", "w4a8-g32-asym")),
    *(("linear", scheme, torch.bfloat16) for scheme in ("w4a16-g32-asym", "w8a16")),
    *(("conv2d", scheme, torch.float32) for scheme in ("w8a8-static(0.05,3)", "w8a16")),
]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(
    ("kind", "scheme", "dtype", "dynamic"), sampled([(*layer, d) for layer in LAYERS for d in (False, True)], 6)
)
def test_gradients_in_one_graph(kind, scheme, dtype, dynamic):
    # A stride above 1 and one channel per group: the convolution is an op in the graph.
    made = torch.nn.Linear(64, 32) if kind == "linear" else torch.nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=4)
    kinds = {"linear": qcore.nn.QuantizedLinear, "conv2d": qcore.nn.QuantizedConv2d}
    with qcore.using("torch", verify="off"):
        layer = kinds[kind].from_float(made.to(dtype), scheme)
    assert layer.decision.kernel.name.startswith("torch.")
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for count in (3, 5, 90):
        x = torch.randn((count, 64) if kind == "linear" else (count, 4, 5, 6)).to(dtype)
        found = []
        for call in (compiled, layer):
            inputs, layer.bias.grad = x.clone().requires_grad_(), None
            y = call(inputs)
            y.float().pow(2).sum().backward()
            found.append((y.detach(), inputs.grad, layer.bias.grad))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outliers_in_a_graph(tools, dtype):
    made = tools.linear("w8a16", dtype, n=16)
    kernel = made.kernels.get("torch.cpu.w8a16")
    if kernel is None:
        pytest.skip("this CPU has no exact int8 product")
    torch._dynamo.reset()
    compiled = torch.compile(kernel, fullgraph=True, dynamic=True, backend="aot_eager")
    cases = CONTRACTS["linear"].cases([Scheme.parse("w8a16")], [dtype])
    problems = [case.build(3) for case in cases if case.id.endswith("spikes]")]
    problems += [replace(problem, x=problem.x[row : row + 2]) for problem in problems for row in range(3)]
    for problem in problems:
        agrees(problem, compiled(problem.x, kernel.pack(problem.weight), None))


def test_narrow_images_in_a_graph():
    with qcore.using("torch"), torch.no_grad():
        for scheme in ("w8a16", "w8a8-static(0.05,3)"):
            conv = torch.nn.Conv2d(4, 6, (1, 2), stride=(1, 2), padding=(0, 3), dilation=(1, 2))
            layer = qcore.nn.QuantizedConv2d.from_float(conv, scheme)
            torch._dynamo.reset()
            compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
            for width in (2, 5, 1):
                x = torch.randn(2, 4, 6, width)
                torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8-static", "w8a8"])
def test_one_graph_of_a_convolution(case, scheme):
    problem, kernels = case(scheme, dtype=torch.bfloat16)
    for kernel in kernels.values():
        packed = kernel.pack(problem.weight)
        torch._dynamo.reset()
        compiled = torch.compile(kernel, fullgraph=True, dynamic=True, backend="aot_eager")
        for batch in (2, 5):
            x = torch.randn(batch, *problem.x.shape[1:]).bfloat16()
            verdict = CONTRACTS["conv2d"].judge(replace(problem, x=x), compiled(x, packed, problem.bias))
            assert verdict.ok, f"{kernel.name}: {verdict.message}"


def test_one_graph_of_an_embedding(table):
    kernel, packed, weight = table(Format("int4", 32, ZeroPoint.INT))
    compiled = torch.compile(kernel, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (3, 7):
        index = torch.arange(count)
        assert torch.equal(compiled(index, packed), weight.dequantize()[:count])
