"""The kernels for few rows on NVIDIA, in Triton's interpreter: what their inline PTX does is done by stand-ins."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import cuda_problems
import ptx_stand_ins
import pytest
import torch
from cuda_problems import assert_right, packed_weight
from cuda_problems import linear_problem as problem
from grids import sampled

from qcore import DynamicInt8

pytestmark = pytest.mark.usefixtures("interpreter")

FLOAT = (
    "w4a16", "w4a16-asym", "w4a16-fzp", "w4a16-g32-fzp", "w4a16-g64-asym", "w4a16-g128", "w4a16-g96-asym",
    "w8a16", "w8a16-asym", "w8a16-fzp", "w8a16-g32-asym", "w8a16-g64-fzp", "w8a16-g256",
)  # fmt: skip
INT8 = (
    "w8a8", "w8a8-asym", "w8a8-fzp-aasym", "w8a8-asym-aasym", "w8a8-g32", "w8a8-g64-asym", "w8a8-g64-fzp-aasym",
    "w8a8-static", "w8a8-static-o8", "w4a8", "w4a8-asym", "w4a8-fzp-aasym", "w4a8-g32", "w4a8-g32-asym-token-o8t",
    "w4a8-g64-asym-aasym", "w4a8-g96-asym-aasym", "w4a8-g128-fzp-aasym", "w4a8-g256-asym",
)  # fmt: skip
SIZES = ((1, 48, 304), (1, 20, 77), (3, 33, 300), (11, 80, 168))
SHAPES = ((1, 1, 4, 2), (1, 4, 2, 3), (2, 1, 2, 3), (4, 2, 1, 2))


@pytest.fixture(autouse=True)
def ampere(monkeypatch):
    """A device that has PTX, and no dependent launches, which the interpreter lacks."""
    from qcore_cuda.runtime.device import Device

    ptx_stand_ins.install(monkeypatch)
    return Device(80, False, 4)


def packed(case):
    return packed_weight(case, sums=case.request.activation is not None)


def float_product(case, device, shape):
    from qcore_cuda.products.float32_split import SplitRows
    from qcore_cuda.products.gemv import GEMV
    from qcore_cuda.products.skinny_gemm import WarpShape

    product = SplitRows(GEMV) if case.x.dtype == torch.float32 else GEMV
    return cuda_problems.float_product(case, packed(case)[0], product, WarpShape(*shape), device)


def int8_product(case, device, shape):
    from qcore_cuda.products.int8_gemv import INT8_GEMV
    from qcore_cuda.products.skinny_gemm import WarpShape

    return product_of_codes(case, device, INT8_GEMV, WarpShape(*shape))


def product_of_codes(case, device, product, config):
    from qcore_cuda import int8
    from qcore_cuda.products.base import Choice, Operands
    from qcore_triton.codes import SYMMETRIC, Given, mode_of

    weight, sums = packed(case)
    activation, output, given = case.request.activation, case.request.output, case.given
    dynamic = isinstance(activation, DynamicInt8)
    of_x = of_y = None
    if not dynamic:
        numbers = (activation.scale, activation.zero_point)
        of_x = Given(*((given["x_scale"], given["x_zero_point"]) if activation.per_token else numbers))
    if output is not None:
        numbers = (output.scale, output.zero_point)
        of_y = Given(*((given["out_scale"], given["out_zero_point"]) if output.per_token else numbers))
    symmetric = dynamic and activation.symmetric
    mode = mode_of(case.x, symmetric, of_x)
    problem = int8.plan_of(case.x, weight, case.request.out_dtype, mode.kind != SYMMETRIC, of_y).problem
    operands = Operands(weight, None if symmetric else sums, case.bias, of_y)
    return int8.run(case.x, mode, operands, int8.planned(device, problem, Choice(product, config)))


def cases(schemes):
    """Every scheme with two of the sizes in turn, every size with half of the schemes."""
    return [(scheme, index) for i, scheme in enumerate(schemes) for index in (i % 2, 2 + (i + i // 2) % 2)]


@pytest.mark.parametrize(("scheme", "index"), sampled(cases(FLOAT), 12))
def test_float_activations_are_right(scheme, index, ampere):
    m, n, k = SIZES[index]
    case = problem(scheme, m, n, k, (torch.bfloat16, torch.float16)[index % 2], "float32" if index > 1 else "none")
    assert_right(case, float_product(case, ampere, SHAPES[index]))


@pytest.mark.parametrize("k", [77, 129])
@pytest.mark.parametrize(("scheme", "m"), [("w4a16-g32", 1), ("w8a16", 3), ("w8a16-g64-asym", 1), ("w4a16-asym", 11)])
def test_x_is_read_where_it_lies_up_to_its_last_column(scheme, m, k, ampere):
    case = problem(scheme, m, 48, k, torch.bfloat16)
    lines = torch.full((m, k + 24 - k % 8), float("nan"), dtype=torch.bfloat16)  # rows begin on 16 bytes
    lines[:, :k] = case.x
    case = replace(case, x=lines[:, :k])
    assert case.x.data_ptr() % 16 == 0
    assert_right(case, float_product(case, ampere, SHAPES[2]))


@pytest.mark.parametrize("m", [1, 3, 11])
@pytest.mark.parametrize(
    "scheme",
    [
        "w8afp8-g128", "w4afp8-g64-asym", "w8afp8-g64-fzp", "w4afp8-g32", "w8afp8-g192", "w8afp8", "w4afp8",
        "w8afp8-g64-asym-token",
    ],
)  # fmt: skip
def test_codes_of_e4m3_are_scaled_by_token_or_group(scheme, m, ampere, monkeypatch):
    from qcore_cuda import fp8
    from qcore_cuda.linear import kernel

    monkeypatch.setattr(fp8, "device_of", lambda _: ampere)
    monkeypatch.setattr(fp8.weight_only, "linear", None)
    case = problem(scheme, m, 50, 300, torch.bfloat16, "same")
    mine = kernel(case.request)
    assert_right(case, mine.run(case.x, mine.pack(case.weight), case.bias))


@pytest.mark.parametrize(("scheme", "m"), [("w4a16-g64-asym", 1), ("w8a16-fzp", 3), ("w4a16", 5)])
def test_float32_is_three_times_as_many_rows(scheme, m, ampere):
    case = problem(scheme, m, 48, 300, torch.float32, "same")
    assert_right(case, float_product(case, ampere, SHAPES[2]))


@pytest.mark.parametrize(
    ("shape", "scheme"), sampled([(shape, s) for shape in SHAPES for s in ("w4a16-g128-asym", "w8a16-g64")], 4)
)
def test_every_shape_of_a_program_is_right(scheme, shape, ampere):
    case = problem(scheme, 2, 80, 1100)
    assert_right(case, float_product(case, ampere, shape))


CHUNKS = [(17, 16), (33, 16), (24, 32), (40, 32)]
IN_CHUNKS = [
    (s, *chunk)
    for s in ("w4a16-g128", "w4a16-g32-asym", "w8a16-fzp", "w8a16-g64-asym", "w4a16-fzp", "w4a8-g32-asym-aasym",
              "w8a8-static-o8", "w4a8-asym-token-o8t", "w8a8-fzp-aasym")
    for chunk in CHUNKS
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "m", "tokens"), sampled(IN_CHUNKS, 12))
def test_more_rows_are_multiplied_in_chunks(scheme, m, tokens, ampere):
    from qcore_cuda.products.chunks import GEMV_CHUNKS, INT8_GEMV_CHUNKS, Chunks

    case, config = problem(scheme, m, 48, 200, torch.bfloat16, "same"), Chunks(1, 1, 2, 2, tokens=tokens)
    if case.request.activation is not None:
        y = product_of_codes(case, ampere, INT8_GEMV_CHUNKS, config)
    else:
        y = cuda_problems.float_product(case, packed(case)[0], GEMV_CHUNKS, config, ampere)
    assert_right(case, y)


@pytest.mark.parametrize("scheme", ["w8afp8", "w4afp8-fzp", "w4afp8-g128-token", "w8afp8-g64"])
def test_codes_of_e4m3_are_multiplied_in_chunks(scheme, ampere, monkeypatch):
    from qcore_cuda import fp8
    from qcore_cuda.linear import kernel
    from qcore_cuda.products.base import Choice
    from qcore_cuda.products.chunks import GEMV_CHUNKS, Chunks

    chosen = Choice(GEMV_CHUNKS, Chunks(1, 1, 2, 2, tokens=16))
    monkeypatch.setattr(fp8, "device_of", lambda _: ampere)
    monkeypatch.setattr(fp8, "choose_among", lambda *_: chosen)
    monkeypatch.setattr(fp8, "GEMM_HOPPER", SimpleNamespace(name="gemm_hopper", serves=lambda *_: True))
    monkeypatch.setattr(fp8.weight_only, "linear", None)
    fp8.way_of.cache_clear()
    case = problem(scheme, 19, 50, 300, torch.bfloat16, "same")
    mine = kernel(case.request)
    assert_right(case, mine.run(case.x, mine.pack(case.weight), case.bias))
    fp8.way_of.cache_clear()


def test_chunks_are_for_17_to_128_rows():
    from qcore_cuda.problem import GemmProblem
    from qcore_cuda.products.chunks import GEMV_CHUNKS, INT8_GEMV_CHUNKS
    from qcore_cuda.runtime.device import Device

    device = Device(90, False, 132)
    for kernel, codes in ((GEMV_CHUNKS, False), (INT8_GEMV_CHUNKS, True)):
        served = [m for m in (16, 32, 128, 256) if kernel.serves(device, GemmProblem(4, 1024, 1024, m, codes=codes))]
        assert served == [32, 128]
        assert not kernel.serves(Device(0, True, 132), GemmProblem(4, 1024, 1024, 32, codes=codes))
        found = list(kernel.candidates(device, GemmProblem(8, 1024, 1024, 64, codes=codes)))
        work = [kernel.work(device, GemmProblem(8, 1024, 1024, 64, codes=codes), config).programs for config in found]
        assert len(set(found)) == len(found) == 8
        assert work == [64 // config.row_blocks * (64 // config.tokens) for config in found]


@pytest.mark.parametrize(("scheme", "index"), sampled(cases(INT8), 14))
def test_int8_activations_are_right(scheme, index, ampere):
    m, n, k = SIZES[index]
    case = problem(scheme, m, n, k, (torch.bfloat16, torch.float16)[index % 2], "float32" if index > 1 else "none")
    assert_right(case, int8_product(case, ampere, SHAPES[index]))


@pytest.mark.parametrize("inputs", ["outliers", "zero-rows"])
@pytest.mark.parametrize("scheme", ["w8a8-aasym", "w4a8-g32"])
def test_a_row_that_a_program_quantizes_itself_may_be_odd(scheme, inputs, ampere):
    case = problem(scheme, 1, 20, 160, inputs=inputs)
    assert_right(case, int8_product(case, ampere, SHAPES[0]))


def test_a_row_without_a_number_gives_none(ampere):
    case = problem("w8a8", 1, 16, 64)
    case.x[0, 5] = float("nan")
    assert int8_product(case, ampere, SHAPES[0]).isnan().all()


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8-g128-asym-aasym"])
def test_a_long_row_is_quantized_in_several_turns(scheme, ampere):
    case = problem(scheme, 1, 32, 1160)
    assert_right(case, int8_product(case, ampere, (1, 2, 2, 2)))


@pytest.mark.parametrize("scheme", sampled(["w8a8-asym-aasym", "w4a8"], 1))
def test_more_columns_than_int32_sums_hold_are_added_in_parts(scheme, ampere):
    case = problem(scheme, 1, 16, (1 << 16) + 40)
    assert_right(case, int8_product(case, ampere, (1, 4, 4, 2)))


@pytest.mark.parametrize("scheme", ["w4a16-g32-fzp", "w4a16-g64-asym", "w8a16-g32", "w4a8-g32-asym"])
def test_packed_tensors_may_start_anywhere(scheme, ampere, monkeypatch):
    def moved(tensor):
        return None if tensor is None else torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    case = problem(scheme, 2, 48, 160)
    weight, sums = packed(case)
    weight = weight._replace(data=moved(weight.data), scale=moved(weight.scale), zero=moved(weight.zero))
    assert weight.scale.data_ptr() % 16
    monkeypatch.setitem(globals(), "packed", lambda _: (weight, sums))
    a8 = case.request.activation is not None
    assert_right(case, int8_product(case, ampere, SHAPES[2]) if a8 else float_product(case, ampere, SHAPES[2]))


def test_a_row_gives_the_same_bits_alone_and_among_others(ampere):
    case = problem("w4a8-g32-asym", 2, 32, 160)
    both, first = int8_product(case, ampere, SHAPES[2]), replace(case, x=case.x[:1].clone())
    assert torch.equal(int8_product(first, ampere, SHAPES[2])[0], both[0])


@pytest.mark.parametrize("change", ["strided", "unaligned"])
def test_a_row_without_wide_loads_is_quantized_first(change, ampere):
    case = problem("w4a8-g32", 1, 32, 160)
    wide = torch.zeros(1, 2 * 160 + 1, dtype=case.x.dtype)
    x = wide[:, : 2 * 160 : 2] if change == "strided" else wide[:, 1:161]
    x.copy_(case.x)
    case = replace(case, x=x)
    assert_right(case, int8_product(case, ampere, SHAPES[0]))


def test_a_shape_is_made_smaller_until_its_ring_fits(ampere):
    from qcore_cuda.kernels.smem_pipeline import STATIC, scratch
    from qcore_cuda.products.skinny_gemm import Ring, WarpShape

    ring = Ring(block=1024, x=4096, parameters=32, blank=0)
    shape = ring.fitted(WarpShape(4, 2, 8, 4), ampere, dynamic=False)
    assert ring.size(shape) + scratch(shape.warps) <= STATIC
    assert shape.stages >= 2
    small = WarpShape(1, 1, 4, 2)
    assert ring.fitted(small, ampere, dynamic=False) == small


def test_int8_activations_of_one_row_take_one_launch(monkeypatch, ampere):
    from qcore_cuda.products import int8_gemv, quantized

    launched = []
    for module in (int8_gemv, quantized):
        monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: launched.append(kernel.fn.__name__))
    int8_product(problem("w4a8-g32", 1, 32, 64), ampere, SHAPES[0])
    int8_product(problem("w4a8-g32", 2, 32, 64), ampere, SHAPES[0])
    assert launched == ["int8_gemv", "quantize_rows", "int8_gemv"]
