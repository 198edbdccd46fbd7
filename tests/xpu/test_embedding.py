"""Row gathers against the contract, interpreted; indices out of range."""

from __future__ import annotations

import pytest
import torch
from embedding_cases import DTYPES, SCHEMES, cases, told_by
from xpu_triton_problems import CPU, check, kernel_for, why_not

import qcore
from qcore.contracts import Problem
from qcore.weights.schemes import Scheme


def table(n, k, fmt=None, dtype=torch.float32, scale_dtype=torch.float32):
    weight = qcore.quantize(torch.randn(n, k), fmt or qcore.Format("int8"), scale_dtype=scale_dtype)
    return weight, qcore.EmbeddingRequest(CPU, dtype, n, k, weight.format)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_contract(interpreter, case):
    check(case.build(seed=3))


@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_scales_of_any_dtype(interpreter, scale_dtype):
    for zero in qcore.ZeroPoint:
        weight, request = table(20, 160, qcore.Format("int4", 32, zero), torch.bfloat16, scale_dtype)
        check(Problem(request, torch.tensor([[0, 19], [7, 7]]), weight))


def test_wide_rows_take_several_programs(interpreter):
    weight, request = table(3, 9000, qcore.Format("int4", 128))
    check(Problem(request, torch.tensor([2, 0, 1]), weight))


@pytest.mark.parametrize("index", [-1, 20, 1 << 40])
def test_index_out_of_range_is_an_error(interpreter, index):
    weight, request = table(20, 64)
    kernel = kernel_for(request)
    with pytest.raises(IndexError, match="20 rows"):
        kernel(torch.tensor([3, index]), kernel.pack(weight), None)


def test_index_out_of_range_asserts_in_the_kernel(interpreter, monkeypatch):
    from dataclasses import replace

    from triton.runtime.interpreter import interpreter_builder

    from qcore_xpu import gathering

    monkeypatch.setattr(gathering, "check_indices", lambda *_: None)
    monkeypatch.setattr(interpreter_builder, "options", replace(interpreter_builder.options, debug=True))
    weight, request = table(20, 64)
    kernel = kernel_for(request)
    with pytest.raises(Exception, match="an index is out of range"):
        kernel(torch.tensor([3, 20]), kernel.pack(weight), None)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_where_nothing_asserts_a_row_that_is_not_there_is_nan(interpreter, monkeypatch, scheme):
    """On some GPUs an assertion of a Triton kernel does nothing."""
    from qcore_xpu import gathering

    monkeypatch.setattr(gathering, "check_indices", lambda *_: None)
    fmt = Scheme.parse(scheme).weight
    weight, request = table(20, 192, fmt, torch.float16)
    kernel = kernel_for(request)
    rows = kernel(torch.tensor([3, 20, -1, 19, 1 << 40]), kernel.pack(weight), None)
    assert rows[[1, 2, 4]].isnan().all()
    check(Problem(request, torch.tensor([3, 19]), weight))
    assert rows[[0, 3]].isfinite().all()


def test_strided_indices_and_none(interpreter):
    weight, request = table(20, 64)
    check(Problem(request, torch.arange(12).view(3, 4).t()[::2], weight))
    assert check(Problem(request, torch.empty(0, 3, dtype=torch.int32), weight)).shape == (0, 3, 64)


def test_op_agrees_with_its_fake(interpreter):
    from qcore_xpu_stand_in.replacing import register_for_cpu
    from torch.library import opcheck

    from qcore_xpu import triton_ops

    register_for_cpu()
    weight, request = table(20, 64)
    kernel = kernel_for(request)
    packed = kernel.pack(weight)
    indices = torch.tensor([[1, 2], [19, 0]])
    opcheck(triton_ops.op_embedding, (indices, packed["data"], packed["scale"], None, *kernel.sizes, torch.float16))


def test_group_sizes_that_have_no_kernel_are_refused():
    _, request = table(20, 80, qcore.Format("int4", 40))
    assert "not a multiple of 32" in why_not(request)


COMPILE = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from qcore_xpu.gathering import _ASSERTING
from qcore_triton.kernels.gather import gather_pieces

types = {"indices": "*i64", "data": "*u8", "scale": "*bf16", "zero": "*bf16", "factor": "*bf16", "out": "*bf16"}
types |= {"v": "i32", "d": "i32"}
types |= {"group": "i32", "blocks": "i32", "stride": "i32", "pieces": "i32"}
constants = {"BITS": 4, "P": 128, "NB": 16, "ZERO": 0, "ELEMENT": "int", "FACTOR": False, "HALVES": False}
for one in ((), ("blocks", "v")):  # Triton makes a constant of an argument that is 1
    ones = {name: 1 for name in one}
    signature = types | {name: "constexpr" for name in (*constants, *one)}
    source = ASTSource(gather_pieces, signature=signature, constexprs=constants | ones)
    for target in (GPUTarget("cuda", 80, 32), GPUTarget("hip", "gfx942", 64)):
        code = triton.compile(source, target=target, options={**_ASSERTING, "num_warps": 4}).asm
        text = code.get("ptx") or code["amdgcn"]
        print(json.dumps([text.count("assertfail") + text.count("s_trap"), text.count("overflow detected")]))
"""


def test_compiled_it_asserts_on_the_device():
    pytest.importorskip("triton")
    found = told_by(COMPILE)
    assert len(found) == 4
    for assertions, overflows in found:
        assert assertions, "the one assertion"
        assert overflows == 0
