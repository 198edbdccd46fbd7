"""`linear` as steps on a device: every case of the contract, and what its cases do not reach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from vulkan_problems import assert_right, drawn, run_linear, vulkan  # noqa: F401

from qcore import OutputInt8, QTensor, StaticInt8
from qcore.contracts import LINEAR, LinearRequest
from qcore.weights.schemes import SCHEMES, Scheme
from qcore_vulkan import layout
from qcore_vulkan.steps import prepare, product, rows, selection

MORE = (
    "w8a16-fzp", "w8a16-g5-asym", "w4a16-g48-asym", "w4a16-g1", "w8a8-fzp-aasym", "w8a8-g5-asym-aasym", "w8a8-g512",
    "w4a8-fzp", "w4a8-g32-fzp-aasym", "w4a8-g48-asym-static", "w8a8-asym-o8t", "w4a8-g128-asym-aasym-o8",
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.mark.parametrize("scheme", [*SCHEMES, "w4a8-g32-asym-token", "w4a8-g32-asym-token-o8t"])
def test_cases_of_the_contract(vulkan, scheme):  # noqa: F811
    cases = [case for case in LINEAR.cases([Scheme.parse(scheme)], [torch.float32]) if case.scheme == scheme]
    for problem in (case.build(1) for case in cases):
        if problem.x.numel():
            assert_right(vulkan, problem)
    assert vulkan.stats().messages == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["w4a16-g128-asym", "w8a8-aasym"])
def test_narrow_floats(vulkan, scheme, dtype):  # noqa: F811
    for case in LINEAR.cases([Scheme.parse(scheme)], [dtype]):
        problem = case.build(2)
        if problem.x.numel() and case.scheme == scheme:
            assert_right(vulkan, problem)


@pytest.mark.parametrize("scheme", MORE)
def test_more_schemes(vulkan, scheme):  # noqa: F811
    for m, n, k in ((1, 33, 200), (2, 8, 64), (7, 20, 77), (19, 40, 600)):
        assert_right(vulkan, drawn(scheme, m, n, k, bias="same"))


@pytest.mark.parametrize("scheme", ["w4a16-fzp", "w4a16-g1-fzp", "w4a8-fzp"])
def test_a_large_scale_beside_a_small_zero_point(vulkan, scheme):  # noqa: F811
    """Codes are near 0, but stored as q + 8: eight times the scale must not meet the float zero point."""
    problem = drawn(scheme, 3, 9, 20)
    weight = problem.weight
    weight = QTensor.from_codes(weight.codes() * 0, weight.scale * 0 + 1e6, weight.zero * 1e-4, weight.format)
    assert_right(vulkan, replace(problem, weight=weight))


@pytest.mark.parametrize("scheme", ["w8a8-aasym", "w4a8-asym-aasym", "w8a16"])
def test_long_rows(vulkan, scheme):  # noqa: F811
    """Sums of 40000 extreme codes would not fit int32, corrections included: groups are cut."""
    problem = drawn(scheme, 2, 9, 40000, weights="codes", inputs="outliers")
    assert layout.Geometry.of(problem.weight.format, 9, 40000).groups == 3
    assert_right(vulkan, problem)


@pytest.mark.parametrize("scheme", ["w8a8-static-o8", "w4a8-g32-asym-token-o8t", "w4a16-g32", "w8a8-aasym"])
def test_rows_are_cut_where_scratch_memory_would_grow_large(vulkan, scheme, monkeypatch):  # noqa: F811
    monkeypatch.setattr(rows, "_LARGEST", 64 * 1024)
    assert_right(vulkan, drawn(scheme, 200, 20, 160, bias="float32"))


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16"])
def test_more_rows_than_workgroups_along_an_axis(vulkan, scheme):  # noqa: F811
    assert_right(vulkan, drawn(scheme, 8 * 65536 + 3, 2, 3))


@pytest.mark.parametrize("scheme", ["w8a8-asym-aasym", "w4a16-g32-fzp"])
def test_weights_in_parts(vulkan, scheme, monkeypatch):  # noqa: F811
    monkeypatch.setattr(layout, "rows_per_part", lambda *_: 16)
    assert_right(vulkan, drawn(scheme, 5, 45, 96, bias="same"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_static_activations_that_are_codes_already(vulkan, dtype):  # noqa: F811
    problem = drawn("w8a8-static", 5, 20, 77)
    x = torch.randint(-128, 128, (5, 77), generator=torch.Generator().manual_seed(3)).to(torch.int8)
    request = replace(problem.request, x_dtype=torch.int8, out_dtype=dtype)
    assert_right(vulkan, replace(problem, x=x, request=request))


def test_floats_with_parameters_per_token(vulkan):  # noqa: F811
    problem = drawn("w4a8-g32-asym-token", 6, 20, 96)
    request = replace(problem.request, x_dtype=torch.float32)
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(4))
    assert_right(vulkan, replace(problem, x=x, request=request))


def test_a_token_that_is_not_finite_spoils_its_own_row_only(vulkan):  # noqa: F811
    for scheme in ("w8a8", "w8a8-aasym", "w4a16-g32"):
        problem = drawn(scheme, 4, 12, 64)
        problem.x[1, 7], problem.x[2, 9] = torch.nan, torch.inf
        y = run_linear(vulkan, problem)
        assert y[[0, 3]].isfinite().all()
        assert y[1].isnan().all()
        assert not y[2].isfinite().any()


def test_results_that_overflow_float16_are_infinite(vulkan):  # noqa: F811
    problem = drawn("w8a16", 3, 12, 64, torch.float16, inputs="large")
    problem = replace(problem, x=(problem.x.float() * 1e6).clamp(-6e4, 6e4).half())
    y = run_linear(vulkan, problem)
    assert y.isinf().any()
    assert LINEAR.judge(problem, y).ok


@pytest.mark.parametrize("scheme", ["w8a8-asym-aasym", "w4a8-g32-asym", "w8a16-g32", "w4a16-fzp"])
def test_results_are_the_same_by_whatever_instructions(vulkan, scheme, monkeypatch):  # noqa: F811
    problem = drawn(scheme, 9, 20, 160)
    results = []
    for integer, floating in (("gemm_int_dot", "gemm_float"), ("gemm_int_plain", "gemm_float_long")):
        monkeypatch.setattr(product, "int_variant", lambda _, name=integer: name)
        monkeypatch.setattr(product, "float_variant", lambda _, name=floating: name)
        results.append(run_linear(vulkan, problem))
    monkeypatch.undo()
    results.append(run_linear(vulkan, problem))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("scheme", ["w8a8-g64-asym-aasym", "w4a16-g32-asym"])
def test_tiles_of_other_devices(vulkan, scheme, monkeypatch):  # noqa: F811
    """GPUs without kernels of their own get the same shaders in other sizes."""
    monkeypatch.setattr(vulkan, "profile", "gpu")
    monkeypatch.setattr(selection, "choose", lambda *_: None)
    monkeypatch.setattr(prepare, "_SMALL", 1000)  # beyond which activations are copied to the device first
    monkeypatch.setattr(vulkan, "description", replace(vulkan.description, local_input=False))
    for m, n, k in ((1, 20, 200), (6, 70, 5000), (2, 9, 70000)):
        assert_right(vulkan, drawn(scheme, m, n, k, torch.bfloat16))


def test_static_output_of_static_input_has_the_requests_numbers(vulkan):  # noqa: F811
    problem = drawn("w8a8-static-o8", 3, 8, 32)
    numbers = {"activation": StaticInt8(0.5, -3), "output": OutputInt8(0.25, 100)}
    request: LinearRequest = replace(problem.request, **numbers)
    y = run_linear(vulkan, replace(problem, request=request))
    assert torch.equal(y, LINEAR.reference(replace(problem, request=request)))
