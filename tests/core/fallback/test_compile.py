"""One graph for every number of rows: torch.compile, torch.export, custom ops."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from qcore.contracts import CONTRACTS

SCHEMES = ["w4a16-g32-asym", "w4a16-g32-fzp", "w8a16-asym", "w8a16", "w8a8", "w4a8-g32-asym-aasym", "w8a8-static-o8"]


def agrees(problem, result):
    verdict = CONTRACTS["linear"].judge(problem, result)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("scheme", SCHEMES)
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
@pytest.mark.parametrize(("scheme", "dtype"), [("w4a16-g32-asym", torch.bfloat16), ("w8a8", torch.float32)])
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
        torch.library.opcheck(torch.ops.qcore_torch.int8pack.default, (x, data, scale))
