"""ATen's int4 product: its byte layout on every instruction set, both ways through it, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from qcore.fallback import cpu_w4a16, int4_blocks
from qcore.formats import Format, ZeroPoint

NAME = "torch.cpu.w4a16"


@pytest.fixture
def fast(tools):
    def make(scheme, **sizes):
        made = tools.linear(scheme, torch.bfloat16, **sizes)
        if NAME not in made.kernels:
            pytest.skip("this torch has no int4 product for CPUs")
        made.kernel = made.kernels[NAME]
        return made

    return make


LAYOUT = """
import torch
from qcore.fallback.int4_blocks import block_layout
from qcore.contracts import CONTRACTS
from qcore.fallback import plugin
from qcore.weights.schemes import Scheme
layout = block_layout()
print(torch.backends.cpu.get_cpu_capability(), layout.size, layout.pairs)
codes = torch.randint(-8, 8, (192, 160), dtype=torch.int8)
assert torch.equal(layout.unpack(layout.pack(codes)), codes)
contract, ran = CONTRACTS["linear"], 0
for case in contract.cases([Scheme.parse(s) for s in ("w4a16-g32-fzp", "w4a16-g128-asym", "w4a16")], [torch.bfloat16]):
    problem = case.build(3)
    kernel = plugin.qcore_linear(problem.request)[0].kernel
    if kernel.name == "torch.cpu.w4a16" and case.scheme in ("w4a16-g32-fzp", "w4a16-g128-asym", "w4a16"):
        packed = kernel.pack(problem.weight)
        assert torch.equal(kernel.unpack(packed).data, problem.weight.data)
        verdict = contract.judge(problem, kernel(problem.x, packed, problem.bias))
        assert verdict.ok, case.id + verdict.message
        ran += 1
print(ran)
"""


@pytest.mark.parametrize(
    ("capability", "size", "pairs"), [("avx512", 64, False), ("avx2", 32, False), ("default", 32, True)]
)
def test_layout_on_each_instruction_set(tools, fast, capability, size, pairs):
    fast("w4a16-g32")
    known, own = ("default", "avx2", "avx512"), torch.backends.cpu.get_cpu_capability().lower()
    # torch takes the variable at its word: instructions that the processor lacks would end the process.
    if own not in known or known.index(capability) > known.index(own):
        pytest.skip(f"this CPU runs {own}")
    name, found, paired, ran = tools.python(LAYOUT, ATEN_CPU_CAPABILITY=capability).split()
    assert name.lower() == capability
    assert (int(found), paired) == (size, str(pairs))
    assert int(ran) > 50


@pytest.mark.parametrize(
    "scheme", ["w4a16-g32-asym", "w4a16-g64", "w4a16-g256-fzp", "w4a16", "w4a16-asym", "w4a16-g96"]
)
@pytest.mark.parametrize("rows", [1, 79, 80, 200])
@pytest.mark.parametrize("n", [1, 64, 200])
def test_few_and_many_rows(tools, fast, scheme, rows, n):
    made = fast(scheme, n=n, k=768 if scheme.endswith("96") else 1024)
    tools.check(made.kernel, made.problem(rows, bias="float32"))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero", list(ZeroPoint))
@pytest.mark.parametrize("group", [32, 256, 512])
def test_unpacking_is_exact_for_every_scale(tools, scale_dtype, zero, group):
    from qcore.weights.quantizers import quantize

    weight = quantize(torch.randn(130, 512), Format("int4", group, zero), scale_dtype=scale_dtype)
    made = tools.linear("w4a16", torch.bfloat16, n=130, k=512)
    kernels = tools.offers(type(made.request)(**{**vars(made.request), "weight": weight.format}))
    if NAME not in kernels:
        pytest.skip("not offered")
    packed = kernels[NAME].pack(weight)
    assert tools.same(kernels[NAME].unpack(packed), weight)
    assert ("scale" in packed) == (scale_dtype != torch.bfloat16 or (group == 512 and zero is not ZeroPoint.FLOAT))


@pytest.mark.parametrize(
    ("scheme", "dtype", "k"), [("w4a16-g32", torch.float32, 256), ("w4a16-g32", torch.bfloat16, 255)]
)
def test_not_offered_where_it_is_wrong_or_slow(tools, scheme, dtype, k):
    assert NAME not in tools.linear(scheme, dtype, k=k).kernels


@pytest.mark.parametrize(("fmt", "k", "group"), [
    (Format("int4", 128), 256, 128),
    (Format("int4", 96), 192, 32),
    (Format("int4", 512), 1024, 0),
    (Format("int4"), 1024, 256),
    (Format("int4", None, ZeroPoint.INT), 96, 32),
    (Format("int4", None, ZeroPoint.FLOAT), 1024, 0),
    (Format("int4", 48), 96, 0),
    (Format("int4", 64), 96, 0),
    (Format("int4"), 0, 0),
])  # fmt: skip
def test_groups(fmt, k, group):
    assert cpu_w4a16.op_group(fmt, k) == group


def test_an_unknown_packing_is_refused(tools, monkeypatch):
    int4_blocks.block_layout.cache_clear()
    try:
        monkeypatch.setattr(
            int4_blocks, "int4_pack", lambda codes, _: torch.zeros(codes.shape[0], 16, dtype=torch.uint8)
        )
        assert int4_blocks.block_layout() is None
        int4_blocks.block_layout.cache_clear()
        monkeypatch.setattr(int4_blocks, "int4_pack", None)
        assert int4_blocks.block_layout() is None
    finally:
        monkeypatch.undo()
        int4_blocks.block_layout.cache_clear()
    assert int4_blocks.block_layout() is not None
