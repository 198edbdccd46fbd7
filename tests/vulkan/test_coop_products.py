"""Products with cooperative matrices against the contract, on devices that have them: GPUs, and lavapipe of Mesa 26."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from torch import nn
from vulkan_problems import assert_right, drawn, vulkan  # noqa: F401

import qcore
from qcore.contracts import LINEAR
from qcore.weights.schemes import Scheme
from qcore_vulkan.steps import fragments, selection
from qcore_vulkan.steps.gpu_kernels import TERMS, CoopF16, CoopFragments, CoopGemv, CoopInt8, TileShape

SCHEMES = (
    "w4a16-g128", "w4a16-g32-asym", "w4a16-g32-fzp", "w8a16", "w8a16-g5-asym", "w8a16-fzp", "w4a16-g16-asym",
    "w4a16-g16-fzp", "w8a16-g16", "w8a16-g16-asym",
)  # fmt: skip
TABLES = ("wfp4a16-g32-e8m0", "wfp4a16-g16-e4m3", "wnf4a16-g64", "wfp4a16-g64-fzp", "wnf4a16", "wfp4_bnba16-g64-fzp")
BYTES = ("wfp8a16", "wfp8a16-g32-e8m0", "wfp8a16-g96", "wfp8a16-g64-fzp", "wfp8a16-g16")
INT4_SCHEMES = (
    "w4a16", "w4a16-g128", "w4a16-g32-asym", "w4a16-g32-fzp", "w4a16-g64", "w4a16-g96-asym", "w4a16-g256", "w4a16-g16",
    "w4a16-g16-asym", "w4a16-g16-fzp",
)  # fmt: skip
INT = ("w8a8", "w8a8-g16-aasym", "w4a8-g16-asym-aasym", "w4a8-g16-fzp", "w8a8-fzp-aasym", "w4a8-g32-asym", "w8a8-g7")
SIZES = ((5, 33, 200), (19, 40, 608), (33, 24, 2080))


@pytest.fixture
def matrix(vulkan) -> tuple[int, int, int]:  # noqa: F811
    """A shape of the device's float16 matrices, summed in float32: the one that kernels are selected for, if any is."""
    if (chosen := selection._matrix(vulkan.description, "f16", "f32")) is not None:
        return chosen
    found = [x for x in vulkan.description.cooperative_matrix if (x.a, x.c, x.scope) == ("f16", "f32", "subgroup")]
    if not found:
        pytest.skip("this device has no cooperative matrices")
    return found[0].m, found[0].n, found[0].k


def only(monkeypatch, device, make) -> None:
    monkeypatch.setattr(device, "profile", "gpu")
    monkeypatch.setattr(selection, "choose", lambda _device, problem: make(problem))


def kernel(device, matrix, x_dtype, kb=1, splits=1) -> CoopF16:
    """Two by two subgroups of two by two matrices each."""
    m, n, _ = matrix
    shape = TileShape(4 * m, 4 * n, 2 * m, 2 * n, kb)
    terms = TERMS if x_dtype == torch.float32 else 1
    return CoopF16(shape, matrix, device.description.subgroup.size, splits, terms)


def make_of(monkeypatch, device, matrix, in_registers) -> None:
    """Only `CoopFragments`, if the weight's elements are to be known in registers, or only `CoopF16`."""
    if in_registers and not fragments.has_layout(device):
        pytest.skip("this device has no cooperative matrices with the layout of qcore_vulkan.steps.fragments")

    def make(problem):
        int4 = in_registers and problem.geometry.bits == 4
        return of_fragments(problem.x_dtype) if int4 else kernel(device, matrix, problem.x_dtype)

    only(monkeypatch, device, make)


@pytest.fixture
def known(vulkan) -> None:  # noqa: F811
    """A device whose matrices have the layout that `CoopFragments` expects."""
    if not fragments.has_layout(vulkan):
        pytest.skip("this device has no cooperative matrices with the layout of qcore_vulkan.steps.fragments")


def of_fragments(x_dtype, kb=2, splits=1, shape=(32, 64, 16, 32)) -> CoopFragments:
    terms = TERMS if x_dtype == torch.float32 else 1
    return CoopFragments(TileShape(*shape, kb), splits, terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [*INT4_SCHEMES, *TABLES])
def test_fragments_are_right(vulkan, monkeypatch, known, scheme, dtype):  # noqa: F811
    for (m, n, k), kb, splits in zip(SIZES, (1, 2, 4), (1, 2, 3), strict=True):
        only(monkeypatch, vulkan, lambda p, kb=kb, s=splits: of_fragments(p.x_dtype, kb, s))
        assert_right(vulkan, drawn(scheme, m, n, k, dtype, bias="same"))


@pytest.mark.parametrize("size", [(70, 300, 1312), (64, 256, 32), (9, 1000, 4100), (130, 8, 2048)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_that_are_selected_are_right(vulkan, monkeypatch, known, dtype, size):  # noqa: F811
    terms = TERMS if dtype == torch.float32 else 1
    for shape, _ in selection._FRAGMENTS[terms]:
        for scheme, splits in (("w4a16-g128", 1), ("w4a16-g32-asym", 4), ("wfp4a16-g32-e8m0", 2), ("wnf4a16-g64", 3)):
            only(monkeypatch, vulkan, lambda p, t=shape, s=splits: CoopFragments(t, s, terms))
            assert_right(vulkan, drawn(scheme, *size, dtype, bias="same"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [*SCHEMES, *TABLES, *BYTES])
def test_products_are_right(vulkan, monkeypatch, matrix, scheme, dtype):  # noqa: F811
    for (m, n, k), kb, splits in zip(SIZES, (1, 2, 1), (1, 1, 3), strict=True):
        only(monkeypatch, vulkan, lambda p, kb=kb, s=splits: kernel(vulkan, matrix, p.x_dtype, kb, s))
        assert_right(vulkan, drawn(scheme, m, n, k, dtype, bias="same"))


@pytest.mark.parametrize("scheme", INT)
def test_products_of_int8_are_right(vulkan, monkeypatch, scheme):  # noqa: F811
    shape, lanes = selection._matrix(vulkan.description, "s8", "s32"), vulkan.description.subgroup.size
    if shape is None:
        pytest.skip("this device has no cooperative matrices of int8 that kernels take")
    m, n, _ = shape
    for size, kb, splits in zip(SIZES, (1, 2, 4), (1, 1, 3), strict=True):
        tile = TileShape(4 * m, 4 * n, 2 * m, 2 * n, kb)
        only(monkeypatch, vulkan, lambda _, t=tile, s=splits: CoopInt8(t, shape, lanes, s))
        assert_right(vulkan, drawn(scheme, *size, bias="same"))


@pytest.mark.parametrize("scheme", ["w4a16-g16-asym", "w8a16-g16", "w8a16-g16-asym", "w4a16-g32-asym", "w8a16"])
@pytest.mark.parametrize("tn", [8, 16])
def test_few_rows_are_right(vulkan, monkeypatch, scheme, tn):  # noqa: F811
    d = vulkan.description
    if not (d.subgroup.min <= 32 <= d.subgroup.max and d.has_matrix((16, tn, 16), "f16", "f32")):
        pytest.skip("this device has no cooperative matrices that kernels of few rows take")
    for lanes, r, chunk in ((32, 1, 2), (256, 2, 4), (512, 4, 2)):
        only(monkeypatch, vulkan, lambda _, a=(lanes, r, chunk): CoopGemv(*a, tn))
        for m, n, k in ((3, 64, 200), (17, 27, 1040)):
            assert_right(vulkan, drawn(scheme, m, n, k, torch.bfloat16, bias="same"))


@pytest.mark.parametrize("in_registers", [False, True])
def test_what_floats_can_be(vulkan, monkeypatch, matrix, in_registers):  # noqa: F811
    make_of(monkeypatch, vulkan, matrix, in_registers)
    for scheme in ("w4a16-g32", "w8a16", BYTES[0], *(TABLES[:3] if in_registers else ())):
        for case in LINEAR.cases([Scheme.parse(scheme)], [torch.float32, torch.bfloat16]):
            if any(part in case.id for part in ("large-x", "zero-", "outliers", "tiny", "extreme", "spike", "deep")):
                assert_right(vulkan, case.build(3))


@pytest.mark.parametrize("scheme", ["w4a16-g64", "w8a16", "wnf4a16-g64", "wfp8a16"])
@pytest.mark.parametrize("decades", [0, 3, 5])
def test_float32_keeps_22_bits_beside_larger_values(vulkan, monkeypatch, matrix, decades, scheme):  # noqa: F811
    """Columns whose weight is 0 add nothing to the tolerance; the others must stay within theirs."""
    make_of(monkeypatch, vulkan, matrix, "4a16" in scheme)
    asked = drawn(scheme, 9, 16, 256, torch.float32)
    codes = asked.weight.codes().clone()
    codes[:, ::7] = 7 if "nf4" in scheme else 0
    weight = type(asked.weight).from_codes(codes, asked.weight.scale, asked.weight.zero, asked.weight.format)
    x = asked.x.clone()
    x[:, ::7] *= 10.0**decades
    assert_right(vulkan, replace(asked, weight=weight, x=x))


@torch.no_grad()
def test_models_in_16_bits_multiply_one_term(vulkan, monkeypatch, matrix):  # noqa: F811
    """Their values are float32 on the device, of which a product needs no more bits than their dtype has."""
    asked = []

    def make(problem):
        asked.append(problem)
        return replace(kernel(vulkan, matrix, problem.x_dtype), terms=1 if problem.coarse else TERMS)

    only(monkeypatch, vulkan, make)
    torch.manual_seed(0)
    x = torch.randn(9, 64)
    for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float32, 1e-5)):
        layer = nn.Sequential(nn.Linear(64, 24), nn.GELU()).to(dtype)
        qcore.quantize_(layer, "w4a16-g32")
        with qcore.using("torch"):
            wanted = layer(x.to(dtype)).double()
        torch._dynamo.reset()
        found = torch.compile(layer, backend="qcore_vulkan")(x.to(dtype)).double()
        assert (found - wanted).norm() <= tolerance * wanted.norm()
        assert asked.pop().coarse == (dtype == torch.bfloat16)


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(vulkan, monkeypatch, matrix, value, in_registers):  # noqa: F811
    make_of(monkeypatch, vulkan, matrix, in_registers)
    asked = drawn("w4a16-g32", 9, 16, 64, torch.float32, bias="same")
    asked.x[3, 17] = value
    assert_right(vulkan, asked)
