"""Row gathers against the contract, interpreted; sharing a table with a linear layer; indices out of range."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from embedding_cases import DTYPES, cases, told_by
from grids import sampled

import qcore
from qcore.contracts import EMBEDDING, Problem
from qcore_cuda import ops
from qcore_cuda.embedding import CudaEmbedding
from qcore_cuda.linear import FloatLinear

FEW = 12  # the interpreter runs programs one after the other


def run(problem):
    kernel = CudaEmbedding(problem.request)
    return kernel(problem.x, kernel.pack(problem.weight), None)


@pytest.mark.parametrize("case", sampled(cases(), 40), ids=lambda case: case.id)
def test_contract(interpreter, case):
    problem = case.build(seed=3)
    if problem.x.numel() > FEW:
        problem = replace(problem, x=problem.x.flatten()[:FEW])
    verdict = EMBEDDING.judge(problem, run(problem))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_scales_of_any_dtype(interpreter, dtype, scale_dtype):
    for zero in qcore.ZeroPoint:
        weight = qcore.quantize(torch.randn(20, 160), qcore.Format("int4", 32, zero), scale_dtype=scale_dtype)
        request = qcore.EmbeddingRequest(torch.device("cpu"), dtype, 20, 160, weight.format)
        indices = torch.tensor([[0, 19], [7, 7]])
        problem = Problem(request, indices, weight)
        verdict = EMBEDDING.judge(problem, run(problem))
        assert verdict.ok, verdict.message


@pytest.mark.parametrize("far", [1.0, 2.0**-30])
def test_float16_reads_scales_with_a_factor_and_without(interpreter, far):
    weight = qcore.quantize(torch.randn(20, 160), "int8-g32-asym")
    weight.scale[1, 3] *= far
    request = qcore.EmbeddingRequest(torch.device("cpu"), torch.float16, 20, 160, weight.format)
    problem = Problem(request, torch.arange(20), weight)
    assert CudaEmbedding(request).pack(weight)["factor"].numel() == (far == 1)
    verdict = EMBEDDING.judge(problem, run(problem))
    assert verdict.ok, verdict.message


def test_wide_rows_take_several_programs(interpreter):
    weight = qcore.quantize(torch.randn(3, 9000), qcore.Format("int4", 128))
    request = qcore.EmbeddingRequest(torch.device("cpu"), torch.float32, 3, 9000, weight.format)
    kernel = CudaEmbedding(request)
    torch.testing.assert_close(
        kernel(torch.tensor([2, 0]), kernel.pack(weight), None), weight.dequantize(torch.float32)[[2, 0]]
    )


@pytest.mark.parametrize("index", [-1, 20, 1 << 40])
def test_index_out_of_range_asserts(interpreter, monkeypatch, index):
    from triton.runtime.interpreter import interpreter_builder

    monkeypatch.setattr(interpreter_builder, "options", replace(interpreter_builder.options, debug=True))
    weight = qcore.quantize(torch.randn(20, 64), qcore.Format("int8"))
    kernel = CudaEmbedding(qcore.EmbeddingRequest(torch.device("cpu"), torch.float32, 20, 64, weight.format))
    packed = kernel.pack(weight)
    with pytest.raises(Exception, match="an index is out of range"):
        kernel(torch.tensor([3, index]), packed, None)


def test_strided_indices(interpreter):
    weight = qcore.quantize(torch.randn(20, 64), qcore.Format("int8"))
    kernel = CudaEmbedding(qcore.EmbeddingRequest(torch.device("cpu"), torch.float32, 20, 64, weight.format))
    indices = torch.arange(12).view(3, 4).t()[::2]
    found = kernel(indices, kernel.pack(weight), None)
    torch.testing.assert_close(found, weight.dequantize(torch.float32)[indices])


@pytest.mark.parametrize(("dtype", "packing"), [(torch.bfloat16, ""), (torch.float16, "+half")])
def test_reads_the_table_that_a_linear_layer_packed(dtype, packing):
    fmt, cpu = qcore.grouped_int4(64), torch.device("cpu")
    table = CudaEmbedding(qcore.EmbeddingRequest(cpu, dtype, 50, 192, fmt))
    head = FloatLinear(qcore.LinearRequest(cpu, dtype, dtype, 50, 192, None, fmt, None, None, False, False))
    assert table.packing == head.packing == "triton.planar16" + packing
    weight = qcore.quantize(torch.randn(50, 192), fmt)
    mine, other = table.pack(weight), head.pack(weight)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[key], other[key]) for key in mine)


def test_fake_has_the_form_of_the_result():
    indices = torch.zeros(2, 5, dtype=torch.int32, device="meta")
    data, scale = torch.empty(2, 1, 16, 64, dtype=torch.uint8, device="meta"), torch.empty(1, 20, device="meta")
    found = ops.op_embedding(indices, data, scale, None, None, 20, 77, 4, 77, "int", torch.float16)
    assert (found.shape, found.dtype, found.device.type) == ((2, 5, 77), torch.float16, "meta")


COMPILE = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from qcore_cuda.gather import _OPTIONS
from qcore_triton.kernels.gather import gather

types = {"indices": "*i64", "data": "*u8", "scale": "*bf16", "zero": "*bf16", "factor": "*bf16", "out": "*bf16"}
types |= {"v": "i32", "d": "i32", "group": "i32", "blocks": "i32", "stride": "i32"}
constants = {"BITS": 4, "P": 128, "NB": 32, "ZERO": 0, "ELEMENT": "int", "FACTOR": False, "HALVES": False}
signature = types | {name: "constexpr" for name in constants}
for one in ((), ("blocks", "v")):  # Triton makes a constant of an argument that is 1
    ones = {name: 1 for name in one}
    source = ASTSource(gather, signature=signature | {name: "constexpr" for name in one}, constexprs=constants | ones)
    for target in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
        code = triton.compile(source, target=target, options={**_OPTIONS, "num_warps": 4}).asm
        text = code.get("ptx") or code["amdgcn"]
        counts = [text.count(word) for word in ("call.uni", "s_trap", "overflow detected")]
        print(json.dumps([target.backend, *counts]))
"""


def test_compiled_it_asserts_on_the_device():
    pytest.importorskip("triton")
    found = told_by(COMPILE)
    assert len(found) == 6
    for backend, calls, traps, overflows in found:
        assert (calls if backend == "cuda" else traps) == 1, "the one assertion"
        assert overflows == 0
