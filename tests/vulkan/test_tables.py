"""Weights whose codes index a table (fp8, fp4, nf4, a plugin's own): every kernel, packing, and compiled models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from torch import nn
from vulkan_problems import RUN, assert_right, drawn, vulkan  # noqa: F401

import qcore
from qcore import Element, Format, QTensor, graphs
from qcore.contracts import CONTRACTS, GROUPED_LINEAR, LINEAR
from qcore.formats.elements import forget_elements, register_element
from qcore.resolving.verification import difference
from qcore.weights.schemes import TABLE_SCHEMES, Scheme
from qcore_vulkan import layout, plugin
from qcore_vulkan.graphs.backend import qcore_vulkan
from qcore_vulkan.layout import Geometry, download, table_of, upload
from qcore_vulkan.steps import selection
from qcore_vulkan.steps.gpu_kernels import SharedFloat, TileShape
from qcore_vulkan.steps.row_kernel import RowGemv

SCHEMES = tuple(scheme for scheme in TABLE_SCHEMES if "afp8" not in scheme)
SMALL = TileShape(16, 16, 4, 4, 2)
HOOKS = {name: getattr(plugin, f"qcore_{name}") for name in CONTRACTS}


def only(monkeypatch, device, kernel) -> None:
    """Let ``kernel`` (of a problem) serve every product of ``device``."""
    monkeypatch.setattr(device, "profile", "gpu")
    monkeypatch.setattr(selection, "choose", lambda _device, problem: kernel(problem))


@pytest.mark.parametrize("scheme", TABLE_SCHEMES)
def test_what_is_served(scheme):
    for name, hook in HOOKS.items():
        request = CONTRACTS[name].request_for(Scheme.parse(scheme), torch.device("cpu"), torch.float32, 24, 96)
        answer = hook(request)
        if "afp8" in scheme and name != "embedding":
            assert isinstance(answer, qcore.Refusal)
            assert "fp8 activations have no kernel here" in answer.reason
        else:
            element = Scheme.parse(scheme).weight.dtype
            assert answer.kernel.name.endswith("embedding" if name == "embedding" else f"w{element}a16")


def test_int8_activations_are_refused():
    asked = LINEAR.request_for(Scheme.parse("wfp8a16"), torch.device("cpu"), torch.float32, 24, 96)
    answer = plugin.qcore_linear(replace(asked, activation=qcore.DynamicInt8()))
    assert "fp8 weights have no kernel with int8 activations" in answer.reason


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tiles_in_registers(vulkan, scheme):  # noqa: F811
    for m, n, k in ((1, 33, 200), (19, 40, 77)):
        for dtype in (torch.float32, torch.bfloat16):
            assert_right(vulkan, drawn(scheme, m, n, k, dtype, bias="same"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shared_tiles(vulkan, monkeypatch, scheme):  # noqa: F811
    only(monkeypatch, vulkan, lambda problem: SharedFloat(SMALL, experts=problem.experts))
    for m, n, k in ((2, 8, 64), (5, 20, 77), (19, 40, 600)):
        assert_right(vulkan, drawn(scheme, m, n, k, torch.bfloat16, bias="same"))
    for case in GROUPED_LINEAR.cases([Scheme.parse(scheme)], [torch.float32]):
        if "many-rows" in case.id or "rows-behind" in case.id:
            assert_right(vulkan, case.build(1))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_in_one_step(vulkan, monkeypatch, scheme):  # noqa: F811
    size = vulkan.description.subgroup.size
    only(monkeypatch, vulkan, lambda _: RowGemv("gemv_row_plain", False, 64, 2, 2, size, "float32"))
    for n, k, dtype in ((33, 256, torch.float32), (8, 77, torch.float16), (20, 200, torch.bfloat16)):
        assert_right(vulkan, drawn(scheme, 1, n, k, dtype, bias="same"))


@pytest.mark.parametrize("op", ["conv2d", "embedding"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_convolutions_and_embeddings(vulkan, op, scheme):  # noqa: F811
    for case in list(CONTRACTS[op].cases([Scheme.parse(scheme)], [torch.float32]))[::2]:
        problem = case.build(5)
        if problem.x.numel():
            assert_right(vulkan, problem)


def test_kernels_of_whole_numbers_are_not_chosen(vulkan):  # noqa: F811
    gpu = replace(vulkan.description, type="discrete", limits=replace(vulkan.description.limits, cores=132))
    for text in ("fp8", "fp4-g32-e8m0", "nf4-g64"):
        geometry = Geometry.of(Format.parse(text), 512, 1024)
        for m, dtype in ((1, torch.bfloat16), (1, torch.float32), (4, torch.float32), (64, torch.float16)):
            asked = selection.GemmProblem("gemm_float", m, geometry, dtype, dtype, False)
            found = list(selection.candidates(gpu, asked))
            assert found
            assert all(isinstance(kernel, (RowGemv, SharedFloat)) for kernel in found)
            assert all(kernel.form == "float32" for kernel in found)
            assert isinstance(found[0], RowGemv) == (m == 1)


@pytest.mark.parametrize("experts", [0, 3])
@pytest.mark.parametrize("text", [
    "fp8", "fp8-g48", "fp8_e5m2-g32", "fp8-g32-e8m0", "fp4-g32-e8m0", "fp4-g16-e4m3", "fp4-g16-e4m3d", "nf4-g64",
    "fp4_bnb-g64-fzp",
])  # fmt: skip
def test_weights_come_back_bit_for_bit(vulkan, monkeypatch, text, experts):  # noqa: F811
    torch.manual_seed(2)
    made = [
        qcore.quantize(torch.randn(21, 150, dtype=torch.bfloat16) * 10.0**e, Format.parse(text))
        for e in range(max(experts, 1))
    ]
    weight = QTensor.stack(made) if experts else made[0]
    for rows, count in ((64, 3), (8, 2)):
        monkeypatch.setattr(layout, "rows_per_part", lambda *_, rows=rows: rows)
        monkeypatch.setattr(layout, "experts_per_part", lambda *_, count=count: count)
        assert not difference(download(upload(vulkan, weight)), weight)


def test_exponents_of_scales_come_back_to_the_smallest(vulkan):  # noqa: F811
    codes = torch.randint(0, 16, (8, 255 * 32), dtype=torch.uint8)
    scale = torch.arange(255, dtype=torch.uint8).unsqueeze(1).repeat(1, 8)
    weight = QTensor.from_codes(codes, scale, None, Format.parse("fp4-g32-e8m0"))
    assert not difference(download(upload(vulkan, weight)), weight)


class TestElementsOfPlugins:
    @pytest.fixture(autouse=True)
    def elements(self):
        odd = Element.table("odd5", [float("nan"), *(0.25 * i * i for i in range(1, 31)), float("inf")])
        three, six = Element.integer(3), Element.integer(6)
        for one in (odd, three, six):
            register_element(one, "a test")
        yield
        forget_elements([one.name for one in (odd, three, six)], "a test")

    @pytest.mark.parametrize("text", ["odd5-g32", "int3-g32-asym", "int6-g64", "int6-asym"])
    def test_they_are_served(self, vulkan, monkeypatch, text):  # noqa: F811
        fmt, draw = Format.parse(text), torch.Generator().manual_seed(3)
        low, high = fmt.code_range
        low, high = (1, 30) if fmt.dtype == "odd5" else (low, high)  # the others stand for no number
        codes = torch.randint(low, high + 1, (12, 77), generator=draw).to(fmt.element.code_dtype)
        scale = torch.rand(fmt.groups(77), 12, generator=draw) + 0.5
        zero = None
        if fmt.zero is qcore.ZeroPoint.INT:
            zero = torch.randint(low, high + 1, scale.shape, generator=draw).to(torch.int8)
        weight = QTensor.from_codes(codes, scale, zero, fmt)
        assert not difference(download(upload(vulkan, weight)), weight)
        asked = LINEAR.request_for(Scheme(fmt), torch.device("cpu"), torch.float32, 12, 77)
        x = torch.randn(5, 77, generator=draw)
        assert_right(vulkan, qcore.contracts.Problem(asked, x, weight))
        only(monkeypatch, vulkan, lambda _: SharedFloat(SMALL))
        assert_right(vulkan, qcore.contracts.Problem(asked, x, weight))

    def test_codes_without_a_number_are_zero(self):
        table = table_of(Format.parse("odd5"))
        assert table.shape == (256,)
        assert table[0] == table[31] == 0.0
        assert not table[32:].any()


@pytest.mark.usefixtures("fresh_compiler")
class TestCompiled:
    @pytest.mark.parametrize("scheme", ["wfp8a16-g32-e8m0", "wfp4a16-g16-e4m3", "wnf4a16-g64", "wfp8_e5m2a16"])
    def test_a_model_on_the_device(self, scheme):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(30, 64), nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 9)).eval()
        qcore.quantize_(model, scheme)
        x = torch.randint(0, 30, (3, 5))
        with torch.no_grad():
            found = torch.compile(model, backend=qcore_vulkan)(x)
            torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)
        assert not graphs.explain(model).host

    @pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "mxfp8", "nf4"])
    def test_experts_on_the_device(self, scheme):
        torch.manual_seed(0)
        layer = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(3, 20, 64), scheme)
        x, ends = torch.randn(7, 64), torch.tensor([2, 2, 6], dtype=torch.int32)
        with torch.no_grad():
            found = torch.compile(layer, backend=qcore_vulkan)(x, ends)
            torch.testing.assert_close(found, layer(x, ends), rtol=1e-4, atol=1e-4)
        assert not graphs.explain(layer).host


def test_padding_of_a_table_adds_nothing(vulkan):  # noqa: F811
    # nf4's code 0, which pads rows, stands for -1.
    problem = drawn("wnf4a16-g64", 3, 9, 65)
    found = RUN["linear"](vulkan, problem)
    expected = problem.x.double() @ problem.weight.dequantize(torch.float64).T
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
