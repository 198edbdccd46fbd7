"""Kernels for GPUs: right on whatever device there is, at the edges of their tiles, and chosen as they are meant to be.

Kernels of cooperative matrices: test_coop_products.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from vulkan_problems import assert_right, bring, drawn, place, run_conv2d, run_linear, vulkan  # noqa: F401

import qcore
from qcore import Element, Format, QTensor
from qcore.contracts import CONV2D, LINEAR
from qcore.weights.schemes import Scheme
from qcore_vulkan import layout, native, steps
from qcore_vulkan.builder import Builder
from qcore_vulkan.description import Matrix
from qcore_vulkan.steps import Geometry2d, Image, fragments, product, rows, selection
from qcore_vulkan.steps.gpu_kernels import (
    CoopF16,
    CoopFragments,
    CoopInt8,
    Digits,
    Kernel,
    SharedFloat,
    SharedInt,
    TileShape,
)
from qcore_vulkan.steps.row_kernel import RowGemv

FLOAT = ("w4a16-g128", "w4a16-g32-asym", "w4a16-g32-fzp", "w4a16-g48-asym", "w8a16", "w8a16-g5-asym", "w8a16-fzp")
INT = ("w8a8", "w8a8-aasym", "w8a8-asym", "w8a8-fzp-aasym", "w4a8-g32-asym-aasym", "w4a8-fzp", "w4a8-g48-asym-static")
SIZES = ((1, 33, 200), (2, 8, 64), (5, 20, 77), (19, 40, 600))
SMALL = TileShape(16, 16, 4, 4, 2)


def matrices() -> tuple[Matrix, ...]:
    """Cooperative matrices as an NVIDIA GPU has them."""
    shapes = (("f16", "f32", 16), ("s8", "s32", 32))
    return tuple(Matrix(16, n, k, a, a, c, c, False, "subgroup") for n in (8, 16) for a, c, k in shapes)


def digits(device, count: int, rows: int = 2, chunk: int = 4) -> Digits:
    return Digits("gemv_digits_dot", count, 64, 2, rows, 1, chunk, device.description.subgroup.size)


def only(monkeypatch, device, kernel) -> None:
    """Let ``kernel`` (of a problem) serve every product of ``device``."""
    monkeypatch.setattr(device, "profile", "gpu")
    monkeypatch.setattr(selection, "choose", lambda _device, problem: kernel(problem))


@pytest.mark.parametrize("scheme", FLOAT)
def test_digits_of_floats(vulkan, monkeypatch, scheme):  # noqa: F811
    only(monkeypatch, vulkan, lambda problem: digits(vulkan, 4 if problem.x_dtype == torch.float32 else 3))
    for m, n, k in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert_right(vulkan, drawn(scheme, m, n, k, dtype, bias="same"))


@pytest.mark.parametrize("scheme", INT)
def test_digits_of_int8(vulkan, monkeypatch, scheme):  # noqa: F811
    only(monkeypatch, vulkan, lambda _: digits(vulkan, 1))
    for m, n, k in SIZES:
        assert_right(vulkan, drawn(scheme, m, n, k, bias="same"))


def test_digits_of_what_floats_can_be(vulkan, monkeypatch):  # noqa: F811
    only(monkeypatch, vulkan, lambda problem: digits(vulkan, 4 if problem.x_dtype == torch.float32 else 3))
    for dtype in (torch.float32, torch.float16):
        for case in LINEAR.cases([Scheme.parse("w4a16-g32")], [dtype]):
            if any(part in case.id for part in ("large-x", "zero-", "outliers", "tiny", "extreme", "strided")):
                assert_right(vulkan, case.build(3))


@pytest.mark.parametrize("scheme", FLOAT)
def test_shared_tiles_of_floats(vulkan, monkeypatch, scheme):  # noqa: F811
    only(monkeypatch, vulkan, lambda _: SharedFloat(SMALL))
    for m, n, k in SIZES:
        assert_right(vulkan, drawn(scheme, m, n, k, torch.bfloat16, bias="same"))


@pytest.mark.parametrize("variant", ["gemm_int_shared_dot", "gemm_int_shared_plain"])
@pytest.mark.parametrize("scheme", INT)
def test_shared_tiles_of_int8(vulkan, monkeypatch, scheme, variant):  # noqa: F811
    only(monkeypatch, vulkan, lambda _: SharedInt(variant, SMALL))
    for m, n, k in SIZES:
        assert_right(vulkan, drawn(scheme, m, n, k, bias="same"))


@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w8a8"])
def test_columns_of_convolutions(vulkan, monkeypatch, scheme):  # noqa: F811
    only(monkeypatch, vulkan, lambda problem: digits(vulkan, 1 if problem.op == "gemm_int" else 4))
    for case in list(CONV2D.cases([Scheme.parse(scheme)], [torch.float32]))[::4]:
        problem = case.build(4)
        if problem.x.numel():
            verdict = CONV2D.judge(problem, run_conv2d(vulkan, problem))
            assert verdict.ok, (case.id, verdict.message)


def problem(op: str, m: int, fmt: str, dtype: torch.dtype, n: int = 4096, k: int = 4096) -> product.GemmProblem:
    return product.GemmProblem(op, m, layout.Geometry.of(Format.parse(fmt), n, k), dtype, dtype, False)


@pytest.fixture
def rich(vulkan):  # noqa: F811
    """The description of a GPU that has everything."""
    d = vulkan.description
    return replace(
        d,
        type="discrete",
        cooperative_matrix=matrices(),
        features={**d.features, "integer_dot": True},
        subgroup=replace(d.subgroup, size=32, min=32, max=32, control=True),
        limits=replace(d.limits, cores=132, shared_memory=49152, max_storage_range=(1 << 32) - 1),
    )


def first(description, *args) -> Kernel:
    return next(selection.candidates(description, problem(*args)))


def test_the_order_of_capabilities(rich):
    half = torch.float16
    assert first(rich, "gemm_float", 512, "int4-g128", half).variant == "coop_fragments"
    assert first(rich, "gemm_float", 512, "int8", half).variant == "coop_f16"
    assert first(rich, "gemm_float", 512, "int4-g128", torch.float32).terms == 2
    assert first(rich, "gemm_float", 8, "int4-g128", torch.float32).variant == "coop_fragments"
    assert first(rich, "gemm_float", 8, "int8-g128", torch.float32).variant == "coop_f16"
    coarse = replace(problem("gemm_float", 512, "int4-g128", torch.float32), coarse=True)
    assert next(selection.candidates(rich, coarse)).terms == 1
    assert first(rich, "gemm_float", 4, "int4-g128", torch.float32).variant == "gemv_digits_dot"
    assert first(rich, "gemm_int", 512, "int8", half).variant == "coop_int8"
    assert first(rich, "gemm_int", 512, "int8-g16", half).shape.bm == 128
    assert first(rich, "gemm_int", 512, "int8-asym", half).variant == "gemm_int_shared_dot"
    poor = replace(rich, cooperative_matrix=())
    assert first(poor, "gemm_float", 512, "int4-g128", half).variant == "gemm_float_shared"
    assert first(poor, "gemm_int", 512, "int4-g128", half).variant == "gemm_int_shared_dot"
    assert first(poor, "gemm_float", 1, "int4-g128", half).variant == "gemv_digits_dot"
    poorest = replace(poor, features={**poor.features, "integer_dot": False})
    assert first(poorest, "gemm_int", 512, "int8", half).variant == "gemm_int_shared_plain"
    assert first(poorest, "gemm_float", 1, "int4-g128", half).variant == "gemm_float_shared"


@pytest.mark.parametrize("fmt", ["int8", "int8-g16", "int4-g16", "int8-g32", "int4-g96", "int4-g128", "int4-g512"])
@pytest.mark.parametrize("op", ["gemm_float", "gemm_int"])
def test_tiles_fit_into_groups(rich, op, fmt):
    for m in (1, 8, 16, 100, 512):
        asked = problem(op, m, fmt, torch.bfloat16, k=1536)
        for kernel in selection.candidates(rich, asked):
            if isinstance(kernel, (CoopF16, CoopInt8)):
                whole = asked.geometry.row_blocks if "g16" in fmt else asked.geometry.steps // 2
                assert whole % kernel.shape.blocks(asked.geometry) == 0
            if kernel.variant == "gemv_coop":
                fold = kernel.constants(asked.geometry)[3]
                assert (
                    fold == 0
                    if asked.geometry.groups == 1
                    else asked.geometry.steps % fold == 2 * kernel.chunk % fold == 0
                )


@pytest.mark.parametrize(("lanes", "shared"), [(128, 16384), (1024, 16384), (1024, 32768), (1024, 49152)])
def test_kernels_keep_to_the_limits_of_a_device(rich, lanes, shared):
    limits = replace(rich.limits, max_invocations=lanes, max_group_size=(lanes, lanes, 64), shared_memory=shared)
    small = replace(rich, limits=limits)
    for op in ("gemm_float", "gemm_int"):
        for m in (1, 3, 8, 16, 100, 512):
            asked = problem(op, m, "int4-g128", torch.bfloat16)
            for kernel in selection.candidates(small, asked):
                needs = kernel.needs(asked.geometry)
                assert needs[0] <= lanes
                assert needs[1] <= shared


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_digits_keep_what_is_not_finite(vulkan, monkeypatch, dtype, value, place):  # noqa: F811
    only(monkeypatch, vulkan, lambda asked: digits(vulkan, 4 if asked.x_dtype == torch.float32 else 3))
    for scheme in ("w4a16-g32", "w8a16-g32-fzp"):
        asked = drawn(scheme, 1, 16, 64, dtype, bias="same")
        asked.x[0, place] = value
        assert_right(vulkan, asked)


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g32-asym", "w4a16-g32-fzp"])
@pytest.mark.parametrize("large", [64.0, 4096.0, 60000.0, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_digits_beside_a_large_value_whose_weight_is_zero(vulkan, monkeypatch, dtype, large, scheme):  # noqa: F811
    if large > torch.finfo(dtype).max:
        return
    only(monkeypatch, vulkan, lambda asked: digits(vulkan, 4 if asked.x_dtype == torch.float32 else 3))
    asked = drawn(scheme, 2, 16, 64, dtype, bias="same")
    codes = asked.weight.codes().clone()
    zero = asked.weight.integer_zero()
    codes[:, 5] = 0 if zero is None else zero[0].to(codes.dtype)
    weight = QTensor.from_codes(codes, asked.weight.scale, asked.weight.zero, asked.weight.format)
    x = ((torch.rand(2, 64) * 0.5 + 0.5) * 0.01).to(dtype)
    x[:, 5] = large
    assert_right(vulkan, replace(asked, weight=weight, x=x))


def test_more_rows_never_read_the_weight_by_rows(rich):
    for m in (33, 64, 4096):
        for op in ("gemm_float", "gemm_int"):
            assert "gemv" not in first(rich, op, m, "int8", torch.bfloat16).variant


@pytest.mark.parametrize(
    ("fmt", "variant", "parts"),
    [("int8-g128", "coop_f16", (4, 4, 2, 1)), ("int4-g128", "coop_fragments", (8, 4, 2, 1))],
)
def test_products_of_few_rows_are_split_along_k_to_fill_cores(rich, fmt, variant, parts):
    for m, splits in zip((48, 128, 256, 512), parts, strict=True):
        kernel = first(rich, "gemm_float", m, fmt, torch.bfloat16, 4096, 14336)
        assert (kernel.variant, kernel.splits) == (variant, splits)
        x, y, _ = kernel.shape.groups(m, 4096)
        assert x * y * splits <= 2 * 132


@pytest.mark.parametrize("fmt", ["int8-g128", "int4-g128"])
def test_partial_results_fit_into_scratch_memory(rich, fmt):
    for m, n in ((512, 128256), (2048, 32768), (8192, 8192)):
        asked = problem("gemm_float", m, fmt, torch.float32, n, 65536)
        for kernel in selection.candidates(rich, asked):
            splits = getattr(kernel, "splits", 1)
            assert splits == 1 or 4 * splits * m * n <= 128 << 20


def test_tables_as_float16_numbers():
    long = float.fromhex("0x1.5554p-2")
    for values, halves in (
        ([0.0, 0.125, -6.0, 65504.0], (1, 0)),
        ([0.0, 0.0625, 1.0, 2.0], (1, 13)),
        ([float("nan"), 0.5, 1.0, 2.0], (1, 0)),
        ([long, -1.0, 0.0, 0.5], (2, 14)),
        ([float.fromhex("0x1.55555cp-2")] * 4, (2, 16)),
        ([long, 2.0**-30, 0.0, 0.5], None),  # too small beside the largest
        ([1.0, 2.0**20, 0.0, 0.5], None),
        ([16400.0, -1.0, 0.0, 2.0], (1, 0)),
        ([21845.5, -1.0, 0.0, 2.0], (2, 0)),
        ([2.0**-49, 0.0, 0.0, 2.0**-50], (1, 63)),
        ([2.0**-113, 0.0, 0.0, 2.0**-114], None),  # 2^-127 is no normal number
        ([0.0, 0.0, float("nan"), float("inf")], None),
    ):
        assert layout.halves_of(Element.table("trial", values)) == halves
    assert layout.halves_of(Element.integer(4)) is None
    names = {"fp4": (1, 0), "fp4_bnb": (2, 14), "nf4": (2, 14), "fp8": (1, 6), "fp8_e5m2": None}
    assert {name: layout.halves_of(Format.parse(name).element) for name in names} == names


@pytest.mark.parametrize("element", ["nf4", "fp4_bnb"])
def test_two_halves_hold_what_float16_rounds_off(element):
    values = torch.tensor(Format.parse(element).element.values, dtype=torch.float64)
    scaled = values * 2**14
    first = scaled.half().double()
    rest = (scaled - first).half().double()
    assert ((scaled - first - rest).abs() <= scaled.abs() * 2.0**-22).all()
    assert (scaled != first).any()


@pytest.mark.parametrize(("element", "wanted"), [
    ("fp4-g32-e8m0", CoopFragments), ("fp4-g16-e4m3", CoopFragments), ("nf4-g64", CoopFragments),
    ("fp4_bnb-g64", CoopFragments), ("fp8", CoopF16), ("fp8-g32-e8m0", CoopF16), ("fp8_e5m2", SharedFloat),
])  # fmt: skip
def test_tables_select_cooperative_matrices(rich, element, wanted):
    for m in (2, 8, 512):
        for dtype in (torch.float32, torch.bfloat16):
            found = list(selection.candidates(rich, problem("gemm_float", m, element, dtype, 1024, 1024)))
            assert type(found[0]) is wanted
            assert type(found[-1]) is SharedFloat


@pytest.mark.parametrize("terms", [1, 2])
def test_lanes_share_the_loads_of_fragments_evenly(terms):
    for shape, _ in selection._FRAGMENTS[terms]:
        lanes, shared = CoopFragments(shape, 1, terms).needs(
            problem("gemm_float", 64, "int4-g128", torch.bfloat16).geometry
        )
        assert terms * shape.bm * shape.kb * 4 % lanes == 0
        assert shape.bm % shape.m == shape.bn % shape.n == shape.m % 16 == shape.n % 16 == 0
        assert shared <= 49152


def test_a_row_of_a_table_is_dotted(rich):
    assert first(rich, "gemm_float", 1, "fp4-g32-e8m0", torch.float32).variant == "gemv_row_dot"


def test_fragments_need_a_device_with_their_layout(rich, monkeypatch):
    class Device:
        description, profile = rich, "gpu"

        def pipeline(self, _variant, _constants, _subgroup):
            return 0

    asked = problem("gemm_float", 512, "int4-g128", torch.bfloat16)
    for known, variant in ((True, "coop_fragments"), (False, "coop_f16")):
        monkeypatch.setattr(fragments, "has_layout", lambda _device, known=known: known)
        assert next(selection.usable(Device(), asked)).variant == variant


def test_elements_of_a_matrix_are_each_held_by_one_lane():
    for places in fragments.LAYOUT:
        assert sorted(places[places >= 0].tolist()) == list(range(256))


def test_a_kernel_that_the_compiler_refuses_is_passed_over(rich):
    class Refusing:
        description, profile = rich, "gpu"

        def pipeline(self, variant, _constants, _subgroup):
            if "coop" in variant:
                raise native.Unsupported(variant)

    asked = problem("gemm_float", 512, "int4-g128", torch.float16)
    assert selection.choose(Refusing(), asked).variant == "gemm_float_shared"


def test_a_preferred_kernel_serves(vulkan, monkeypatch):  # noqa: F811
    monkeypatch.setattr(vulkan, "profile", "gpu")
    asked, kernel = problem("gemm_int", 300, "int8", torch.float16), SharedInt("gemm_int_shared_dot", SMALL)
    selection.prefer(vulkan, asked, kernel)
    assert selection.choose(vulkan, asked) is kernel
    selection.forget(vulkan, asked)
    assert selection.choose(vulkan, asked) != kernel


@pytest.mark.parametrize("variant", ["gemv_row_dot", "gemv_row_plain"])
@pytest.mark.parametrize("scheme", [*(one for one in FLOAT if one not in ("w4a16-g48-asym", "w8a16-g5-asym")), "w8a8"])
def test_a_row_in_one_step(vulkan, monkeypatch, scheme, variant):  # noqa: F811
    size, codes = vulkan.description.subgroup.size, scheme == "w8a8"
    only(monkeypatch, vulkan, lambda problem: RowGemv(variant, codes, 64, 2, 2, size))
    for n, k in ((33, 256), (8, 128), (20, 896), (64, 128)):
        assert_right(vulkan, drawn(scheme, 1, n, k, bias="same"))


@pytest.mark.parametrize("scheme", ["w4a16-g32-fzp", "w8a16-fzp", "w4a16-g16-fzp", "w4a16-g32-asym", "w8a8-fzp"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_row_in_one_step_keeps_what_is_not_finite(vulkan, monkeypatch, scheme, value):  # noqa: F811
    size = vulkan.description.subgroup.size
    only(monkeypatch, vulkan, lambda problem: RowGemv("gemv_row_dot", "a8" in scheme, 64, 2, 2, size))
    asked = drawn(scheme, 1, 33, 256, bias="same")
    asked.x[0, 37] = value
    assert_right(vulkan, asked)


@pytest.mark.parametrize("scheme", ["w4a8-g128", "w4a8-g32-asym", "w8a8-asym", "w8a8-fzp"])
def test_a_row_that_is_quantized_in_its_product(vulkan, monkeypatch, scheme):  # noqa: F811
    kernel = RowGemv("gemv_row_dot", True, 128, 1, 1, vulkan.description.subgroup.size)
    only(monkeypatch, vulkan, lambda problem: kernel)
    for n, k in ((33, 256), (64, 1024)):
        assert_right(vulkan, drawn(scheme, 1, n, k, bias="same"))


def test_a_row_of_columns_of_a_convolution(vulkan, monkeypatch):  # noqa: F811
    taken = []

    def kernel(problem):
        taken.append(problem)
        return RowGemv("gemv_row_dot", False, 64, 1, 1, vulkan.description.subgroup.size)

    only(monkeypatch, vulkan, kernel)
    draw = torch.Generator().manual_seed(1)
    pixels, dense = torch.randn(9, 32, generator=draw), torch.randn(16, 32, 3, 3, generator=draw)
    weight = qcore.quantize(dense.movedim(1, -1).reshape(16, 288), Format.parse("int8"))
    b = Builder(vulkan)
    image = Image(bring(b, 9, 32, torch.float32), 1, 32, 3, 3)
    one = Geometry2d((3, 3), (1, 1), (0, 0), (1, 1), 1)
    out = b.output(rows.rows_bytes(1, 16, torch.float32))
    y = steps.conv2d(b, image, layout.upload(vulkan, weight), None, one, None, None, torch.float32, out)
    found = torch.empty(1, 16)
    b.program([place(image.rows)], [place(y.rows)]).run([pixels], [found])
    expected = pixels.reshape(1, 288).double() @ weight.dequantize().double().T
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert [problem.m for problem in taken] == [1]


def test_rows_that_their_kernel_takes(rich):
    for op, fmt in (("gemm_float", "int4-g128"), ("gemm_int", "int8")):
        one = replace(problem(op, 1, fmt, torch.float32), symmetric=op == "gemm_int")
        assert next(selection.candidates(rich, one)).variant == "gemv_row_dot"
        for other in (
            replace(one, m=2), replace(one, x_dtype=torch.bfloat16),
            replace(one, geometry=replace(one.geometry, k=4095)),
        ):  # fmt: skip
            assert next(selection.candidates(rich, other)).variant != "gemv_row_dot"
    assert first(rich, "gemm_int", 1, "int8", torch.float32).variant == "gemv_digits_dot"
    small = replace(rich, limits=replace(rich.limits, shared_memory=4096))
    assert next(selection.candidates(small, one)).variant != "gemv_row_dot"


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_compiled_models_ask_for_the_bits_they_have(vulkan, monkeypatch, dtype):  # noqa: F811
    asked = []

    def kernel(problem):
        asked.append(problem)
        return SharedFloat(SMALL, experts=problem.experts)

    only(monkeypatch, vulkan, kernel)
    torch.manual_seed(0)
    images, tokens, ends = torch.randn(1, 8, 5, 5), torch.randn(9, 64), torch.tensor([4, 9], dtype=torch.int32)
    experts = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(2, 20, 64).to(dtype), "w8a16")
    plain = [(nn.Conv2d(8, 16, 3), images), (nn.Conv2d(8, 16, 1), images), (nn.Linear(64, 24), tokens)]
    models = [(nn.Sequential(layer).to(dtype), x) for layer, x in plain]
    for model, _ in models:
        qcore.quantize_(model, "w8a16")
    for model, x, *rest in (*models, (experts, tokens, ends)):
        found = torch.compile(model, backend="qcore_vulkan")(x.to(dtype), *rest)
        with qcore.using("torch"):
            expected = model(x.to(dtype), *rest)
        assert (found.double() - expected.double()).norm() <= 1e-2 * expected.double().norm()
        assert {problem.coarse for problem in asked} == {dtype != torch.float32}
        asked.clear()


def test_a_device_is_asked_while_torch_traces(vulkan, monkeypatch):  # noqa: F811
    monkeypatch.setattr(fragments, "_layouts", {})
    with FakeTensorMode():
        found = fragments.has_layout(vulkan)
    assert fragments.has_layout(vulkan) is found
    monkeypatch.setattr(fragments, "_layouts", {})
    assert fragments.has_layout(vulkan) is found
