"""Layers of experts: every kernel that serves them, their parts, and what the ends of their rows may be."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from vulkan_problems import RUN, assert_right, vulkan  # noqa: F401

import qcore
from qcore.contracts import GROUPED_LINEAR
from qcore.errors import FormatError
from qcore.nn import QuantizedGroupedLinear
from qcore.weights.schemes import Scheme
from qcore_vulkan import calls, layout, plugin
from qcore_vulkan.layout import Geometry, download, upload
from qcore_vulkan.steps import Ends, rows, selection
from qcore_vulkan.steps.experts import row_tiles
from qcore_vulkan.steps.gpu_kernels import Digits, SharedFloat, SharedInt, TileShape

FLOAT = ("w4a16-g32-asym", "w8a16", "w8a16-g5-fzp")
INT = ("w8a8-asym-aasym", "w4a8-g32-asym-aasym", "w4a8-g48-static")
SMALL = TileShape(16, 16, 4, 4, 2)
_SHAPES = ("uneven", "one-row-each", "many-rows", "rows-behind", "k-odd", "n-odd")


def cases(scheme: str, *dtypes: torch.dtype, seed: int = 1):
    """Problems of the contract that have rows: the shapes that differ for the device."""
    for case in GROUPED_LINEAR.cases([Scheme.parse(scheme)], dtypes or [torch.float32]):
        problem = case.build(seed)
        if problem.x.numel() and any(shape in case.id for shape in _SHAPES):
            yield problem


def only(monkeypatch, device, kernel) -> None:
    """Let ``kernel`` (of a problem) serve every product of ``device``."""
    monkeypatch.setattr(device, "profile", "gpu")
    monkeypatch.setattr(selection, "choose", lambda _device, problem: kernel(problem))


def layer_of(scheme: str, dtype: torch.dtype = torch.float32):
    """Three experts of 64 features to 20."""
    torch.manual_seed(0)
    weight, bias = torch.randn(3, 20, 64).to(dtype), torch.randn(3, 20).to(dtype)
    with qcore.using("vulkan"):
        return QuantizedGroupedLinear.from_float(weight, scheme, bias=bias).requires_grad_(False)


def ends_of(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("scheme", [*FLOAT, *INT])
def test_tiles_in_registers(vulkan, scheme):  # noqa: F811
    for problem in cases(scheme, torch.float32, torch.bfloat16):
        assert_right(vulkan, problem)


@pytest.mark.parametrize("scheme", FLOAT)
def test_shared_tiles_of_floats(vulkan, monkeypatch, scheme):  # noqa: F811
    only(monkeypatch, vulkan, lambda _: SharedFloat(SMALL, experts=True))
    for problem in cases(scheme, torch.float16):
        assert_right(vulkan, problem)


@pytest.mark.parametrize("variant", ["gemm_int_shared_dot", "gemm_int_shared_plain"])
@pytest.mark.parametrize("scheme", INT)
def test_shared_tiles_of_int8(vulkan, monkeypatch, scheme, variant):  # noqa: F811
    only(monkeypatch, vulkan, lambda _: SharedInt(variant, SMALL, experts=True))
    for problem in cases(scheme):
        assert_right(vulkan, problem)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("scheme", [*FLOAT, *INT])
def test_digits(vulkan, monkeypatch, scheme, count):  # noqa: F811
    size = vulkan.description.subgroup.size
    digits = 1 if scheme in INT else 4
    only(monkeypatch, vulkan, lambda _: Digits("gemv_digits_dot", digits, 64, 2, count, 1, 1, size, experts=True))
    for problem in cases(scheme):
        assert_right(vulkan, problem)


@pytest.mark.parametrize("op", ["gemm_float", "gemm_int"])
def test_only_kernels_that_know_experts_are_chosen(vulkan, op):  # noqa: F811
    gpu = replace(vulkan.description, type="discrete", limits=replace(vulkan.description.limits, cores=132))
    geometry = Geometry.of(qcore.Format("int4", 128), 512, 1024)
    for m in (1, 4, 64, 512):
        asked = selection.GemmProblem(op, m, geometry, torch.bfloat16, torch.bfloat16, False, experts=True)
        found = list(selection.candidates(gpu, asked))
        assert found
        assert all(kernel.experts for kernel in found)
        assert m > 8 or isinstance(found[0], Digits)


@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w8a8-asym-aasym"])
def test_weights_in_several_parts(vulkan, monkeypatch, scheme):  # noqa: F811
    monkeypatch.setattr(layout, "experts_per_part", lambda *_: 2)
    for problem in cases(scheme):
        assert len(upload(vulkan, problem.weight).parts) == -(-problem.request.experts // 2)
        assert_right(vulkan, problem)


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-aasym"])
def test_rows_in_several_parts(vulkan, monkeypatch, scheme):  # noqa: F811
    monkeypatch.setattr(rows, "_LARGEST", 1)
    for problem in cases(scheme):
        assert_right(vulkan, problem)


def test_calls_in_several_parts(monkeypatch):
    layer, x, ends = layer_of("w8a16"), torch.randn(150, 64), ends_of(20, 20, 141)
    expected = layer(x, ends)
    monkeypatch.setattr(calls, "LARGEST", 64 * 4 * 7)
    assert torch.equal(layer(x, ends), expected)
    assert not expected[141:].any()


@pytest.mark.parametrize("experts", [1, 3, 128])
@pytest.mark.parametrize("text", ["int8-asym", "int4-g32-asym/plain_int32", "int4-g32-fzp", "int8-g5"])
def test_weights_come_back_bit_for_bit(vulkan, monkeypatch, text, experts):  # noqa: F811
    torch.manual_seed(1)
    each = [qcore.quantize(torch.randn(13, 77, dtype=torch.bfloat16), text) for _ in range(experts)]
    weight = qcore.QTensor.stack(each)
    for step in (experts, 2):
        monkeypatch.setattr(layout, "experts_per_part", lambda *_, step=step: step)
        found = download(upload(vulkan, weight))
        assert (found.shape, found.format, found.scale.dtype) == (weight.shape, weight.format, weight.scale.dtype)
        assert all(torch.equal(mine, weight.tensors()[name]) for name, mine in found.tensors().items())


@pytest.mark.parametrize("ends", [(5, 2, 6), (-3, 4, 7), (2, 99, 100), (7, -1, 3), (2**31 - 1, -(2**31), 0)], ids=str)
def test_ends_that_make_no_sense_stay_within_rows(vulkan, ends):  # noqa: F811
    problem = next(cases("w8a16"))
    weight, x = problem.weight.experts(slice(0, 3)), torch.randn(7, problem.request.k)
    request = replace(problem.request, experts=3)
    made = RUN["grouped_linear"](vulkan, replace(problem, request=request, x=x, weight=weight,
                                                 given={"offsets": ends_of(*ends)}))  # fmt: skip
    expected, start = torch.zeros(7, request.n), 0
    for e, end in enumerate(ends):
        stop = min(max(end, start), 7)
        expected[start:stop] = x[start:stop] @ weight[e].dequantize().T
        start = stop
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


def test_tiles_are_enough_for_any_ends():
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        experts, height = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
        counts = torch.randint(0, 2 * height, (experts + 1,), generator=generator).tolist()  # the last: of no expert
        tiles = sum(-(-count // height) for count in counts)
        found = row_tiles(sum(counts), height, Ends(None, experts, False))
        assert tiles <= found <= tiles + experts + 1


class TestLayer:
    @pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-asym"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_kernel_and_result(self, scheme, dtype):
        layer, x = layer_of(scheme, dtype), torch.randn(7, 64).to(dtype)
        name = "w4a16" if "a16" in scheme else "w8a8"
        for ends in (ends_of(1, 1, 7), ends_of(0, 0, 0), ends_of(7, 7, 7), ends_of(2, 3, 5)):
            found = layer(x, ends)
            assert layer.decision.kernel.name == f"vulkan.grouped_{name}"
            with qcore.using("torch"):
                expected = qcore.grouped_linear(x, layer.weight, ends, layer.bias, activation=layer.scheme.activation)
            assert found.dtype == dtype
            assert (found - expected).norm() <= 1e-2 * expected.norm()

    def test_no_rows(self):
        assert layer_of("w8a16")(torch.empty(0, 64), ends_of(0, 0, 0)).shape == (0, 20)

    def test_the_op_of_graphs(self):
        layer = layer_of("w8a8")
        arguments = (torch.randn(4, 64), ends_of(1, 1, 4), next(layer.buffers()), None, 20)
        torch.library.opcheck(
            torch.ops.qcore_vulkan.grouped_linear.default,
            (*arguments, False, False, None, 0, None, 0, torch.float32),
        )

    def test_errors(self):
        layer = layer_of("w8a16")
        kernel, packed = layer.decision.kernel, {"weight": next(layer.buffers())}
        with pytest.raises(FormatError, match="must ascend within"):
            kernel(torch.randn(4, 64), packed, None, offsets=ends_of(3, 1, 4))
        with pytest.raises(FormatError, match="must ascend within"):
            kernel(torch.randn(4, 64), packed, None, offsets=ends_of(3, 3, 5))
        with pytest.raises(FormatError, match=r"it must be \(T, K\) with K=64"):
            kernel(torch.randn(4, 63), packed, None, offsets=ends_of(1, 1, 4))
        with pytest.raises(FormatError, match=r"needs \(3, 20\)"):
            kernel(torch.randn(4, 64), packed, torch.zeros(20), offsets=ends_of(1, 1, 4))

    def test_memory_goes_with_the_layer(self, device):
        gc.collect()
        before, layer = device.stats().bytes, layer_of("w8a16")
        assert device.stats().bytes - before == qcore.report(layer).bytes_after
        layer(torch.randn(4, 64), ends_of(1, 2, 4))
        del layer
        gc.collect()
        assert device.stats().bytes <= before


def test_an_expert_larger_than_a_buffer_is_refused(monkeypatch):
    request = GROUPED_LINEAR.request_for(Scheme.parse("w8a16"), torch.device("cpu"), torch.float32, 1024, 1024)
    assert isinstance(plugin.qcore_grouped_linear(request), qcore.Offer)
    monkeypatch.setattr("qcore_vulkan.eligibility.largest_range", lambda: 1 << 19)
    answer = plugin.qcore_grouped_linear(request)
    assert isinstance(answer, qcore.Refusal)
    assert "an expert must fit into one buffer" in answer.reason
