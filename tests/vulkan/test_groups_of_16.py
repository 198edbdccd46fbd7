"""Groups of up to 16 columns: two of them share a block of 32 codes, in every kernel, and take no padding in memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from torch import nn
from vulkan_problems import assert_right, drawn, vulkan  # noqa: F401
from vulkan_weights import same, weight_of

import qcore
from qcore import Format, QTensor
from qcore.contracts import CONTRACTS, Problem
from qcore.weights.schemes import Scheme
from qcore_vulkan import layout
from qcore_vulkan.layout import Geometry, download, upload
from qcore_vulkan.steps import selection
from qcore_vulkan.steps.gpu_kernels import Digits, SharedFloat, SharedInt, TileShape
from qcore_vulkan.steps.row_kernel import RowGemv

FLOAT = ("w4a16-g16", "w4a16-g16-asym", "w4a16-g16-fzp", "w8a16-g16", "w8a16-g16-asym", "w8a16-g9-fzp", "w4a16-g1-asym")
TABLES = ("wfp4a16-g16-e4m3d", "wnf4a16-g16", "wfp8a16-g16", "wfp8_e5m2a16-g7")
INT = (
    "w4a8-g16", "w4a8-g16-asym-aasym", "w4a8-g16-fzp-aasym", "w8a8-g16-aasym", "w8a8-g16-asym", "w8a8-g16-fzp",
    "w8a8-g7-asym-aasym", "w4a8-g16-asym-static",
)  # fmt: skip
FORMATS = (
    "int8-g16", "int8-g16-asym", "int8-g5-fzp", "int4-g16", "int4-g16-asym", "int4-g16-fzp", "int4-g9-asym", "int4-g1",
    "int4-g16-asym/plain_int32",
)  # fmt: skip
SMALL = TileShape(16, 16, 4, 4, 2)
DRAWS = 6


def problems(scheme: str, seed: int, most: int = 300, exact: bool = False):
    """Random problems of at most so many rows, of skewed weights and rows; ``exact``: of a row without padding."""
    draw = random.Random(seed)
    for i in range(DRAWS):
        m, n = draw.choice((1, 2, draw.randint(1, most))), draw.choice((1, 8, draw.randint(1, 140)))
        k = 32 * draw.randint(1, 20) if exact else draw.choice((1, 16, 17, 48, draw.randint(1, 700)))
        dtype = torch.float32 if exact else draw.choice((torch.float32, torch.bfloat16, torch.float16))
        yield skewed(drawn(scheme, 1 if exact else m, n, k, dtype, bias="same", seed=seed + i), i)


def skewed(problem: Problem, how: int) -> Problem:
    """The problem with scales that differ by up to 2^10 from group to group, with spikes in x, or as it is."""
    weight, draw = problem.weight, torch.Generator().manual_seed(how)
    if how % 3 == 1 and weight.scale.dtype.itemsize > 1:
        factor = 2.0 ** torch.randint(-5, 6, weight.scale.shape, generator=draw)
        scale = (weight.scale * factor).to(weight.scale.dtype)
        return replace(problem, weight=QTensor(weight.data, scale, weight.zero, weight.shape, weight.format))
    if how % 3 == 2:
        x = problem.x.clone()
        x[..., ::17] *= 50
        return replace(problem, x=x)
    return problem


def only(monkeypatch, device, make) -> None:
    """Let the kernel that ``make`` makes of a problem serve every product of ``device``, as if it was a GPU."""
    monkeypatch.setattr(device, "profile", "gpu")
    monkeypatch.setattr(selection, "choose", lambda _device, problem: make(problem))


@pytest.mark.parametrize("scheme", [*FLOAT, *TABLES, *INT])
def test_tiles_in_registers(vulkan, scheme):  # noqa: F811
    for problem in problems(scheme, 1):
        assert_right(vulkan, problem)


@pytest.mark.parametrize("scheme", [*FLOAT, *TABLES])
def test_shared_tiles_of_floats(vulkan, monkeypatch, scheme):  # noqa: F811
    only(monkeypatch, vulkan, lambda _: SharedFloat(SMALL))
    for problem in problems(scheme, 2, 40):
        assert_right(vulkan, problem)


@pytest.mark.parametrize("scheme", INT)
@pytest.mark.parametrize("kb", [1, 4])
def test_shared_tiles_of_int8(vulkan, monkeypatch, scheme, kb):  # noqa: F811
    only(monkeypatch, vulkan, lambda _: SharedInt("gemm_int_shared_dot", replace(SMALL, kb=kb)))
    for problem in problems(scheme, 3, 40):
        assert_right(vulkan, problem)


@pytest.mark.parametrize("scheme", [*FLOAT, *INT])
@pytest.mark.parametrize("chunk", [1, 4])
def test_digits(vulkan, monkeypatch, scheme, chunk):  # noqa: F811
    size = vulkan.description.subgroup.size

    def make(problem):
        count = 1 if problem.op == "gemm_int" else 4 if problem.x_dtype == torch.float32 else 3
        return Digits("gemv_digits_dot", count, 64, 2, 2, 1, chunk, size)

    only(monkeypatch, vulkan, make)
    for problem in problems(scheme, 4, 9):
        assert_right(vulkan, problem)


@pytest.mark.parametrize("scheme", ["w4a16-g16-asym", "w8a16-g16-fzp"])
@pytest.mark.parametrize("large", [torch.nan, torch.inf, 3e38, 4096.0])
def test_digits_of_a_group_beside_a_large_value(vulkan, monkeypatch, scheme, large):  # noqa: F811
    only(monkeypatch, vulkan, lambda _: Digits("gemv_digits_dot", 4, 64, 2, 1, 1, 1, vulkan.description.subgroup.size))
    for place in (3, 15, 16, 40):
        problem = drawn(scheme, 2, 16, 80)
        x = problem.x.clone() * 0.01
        x[1, place] = large
        assert_right(vulkan, replace(problem, x=x))


@pytest.mark.parametrize("scheme", [*FLOAT[:5], *TABLES[:3], "w4a8-g16-asym", "w8a8-g16-fzp", "w8a8-g16"])
def test_a_row_in_one_step(vulkan, monkeypatch, scheme):  # noqa: F811
    size, of = vulkan.description.subgroup.size, Scheme.parse(scheme)
    form = "rows" if of.weight.element.is_integer else "float32"
    kernel = RowGemv("gemv_row_dot", of.activation is not None, 64, 2, 2, size, form)
    only(monkeypatch, vulkan, lambda _: kernel)
    for problem in problems(scheme, 5, exact=True):
        assert_right(vulkan, problem)


@pytest.mark.parametrize("scheme", ["w4a16-g16-asym", "w8a8-g16-aasym", "wfp4a16-g16-e4m3", "w8a16-g5-fzp"])
@pytest.mark.parametrize("op", ["conv2d", "embedding", "grouped_linear"])
def test_other_contracts(vulkan, op, scheme):  # noqa: F811
    if op == "embedding" and "a8" in scheme:
        scheme = "w8a16-g16"  # a table has no activations
    for case in list(CONTRACTS[op].cases([Scheme.parse(scheme)], [torch.float32, torch.bfloat16]))[::2]:
        problem = case.build(6)
        if problem.x.numel():
            assert_right(vulkan, problem)


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("shape", [(1, 16), (3, 33), (8, 48), (20, 77), (17, 160)])
def test_weights_come_back_bit_for_bit(vulkan, text, shape):  # noqa: F811
    for dtype in (torch.float32, torch.bfloat16):
        weight = weight_of(text, *shape, dtype)
        assert same(download(upload(vulkan, weight)), weight)


@pytest.mark.parametrize("text", ["int8-g16", "int4-g16", "fp4-g16-e4m3", "int4-g16-fzp"])
def test_codes_have_no_padding(vulkan, text):  # noqa: F811
    fmt = Format.parse(text)
    geometry = Geometry.of(fmt, 64, 512)
    assert (geometry.columns, geometry.groups, geometry.steps) == (512, 32, 1)
    part = upload(vulkan, qcore.quantize(torch.randn(64, 512), fmt)).parts[0]
    assert part.codes.nbytes == 64 * 512 * fmt.element.container_bits // 8
    assert part.scale.nbytes == 4 * 64 * 32


def test_an_odd_number_of_groups_ends_with_an_empty_one():
    weight = weight_of("int4-g16-asym", 5, 80)
    geometry = Geometry.of(weight.format, 5, 80)
    assert (geometry.groups, geometry.columns) == (6, 96)
    packed = layout.pack(weight, geometry)
    assert not packed.scale[5].any()
    assert not packed.sums[5].any()
    assert same(layout.unpack(packed, weight.format, geometry, torch.float32), weight)


def test_one_group_and_larger_ones_take_whole_blocks():
    for text, k, columns in (("int4-g16", 16, 32), ("int4", 10, 32), ("int8-g17", 34, 64), ("int8-g48", 96, 128)):
        geometry = Geometry.of(Format.parse(text), 8, k)
        assert (geometry.halved, geometry.columns) == (False, columns)


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
@pytest.mark.parametrize("scheme", ["w4a16-g16-asym", "w8a8-g16", "wfp4a16-g16-e4m3"])
def test_a_compiled_model(vulkan, monkeypatch, scheme, profile):  # noqa: F811
    monkeypatch.setattr(vulkan, "profile", profile)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 96), nn.SiLU(), nn.Linear(96, 24)).eval()
    qcore.quantize_(model, scheme)
    compiled = torch.compile(model, backend="qcore_vulkan")
    for rows in (1, 33):
        x = torch.randn(rows, 80)
        with qcore.using("torch"):
            expected = model(x)
        assert (compiled(x) - expected).norm() <= 2e-2 * expected.norm()
