from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from contract_problems import (
    ALL_SCHEMES,
    CPU,
    DTYPES,
    ERRORS,
    TOKEN,
    F,
    activation_values,
    brute_force_linear,
    conv_cases,
    dense_weight,
    dropped_bias,
    flipped_zero,
    float32_kernel,
    geometry,
    grouped_integer_product,
    linear_cases,
    loop_columns,
    one_code_off,
    shape_name,
    wrong_group,
)

from qcore.contracts import (
    CONV2D,
    LINEAR,
    Conv2dRequest,
    LinearRequest,
    Problem,
    contract_of,
)
from qcore.contracts.conv2d import convolved_size, dense_kernel, im2col, output_size
from qcore.errors import FormatError
from qcore.formats import Format, ZeroPoint
from qcore.weights.activations import DynamicInt8, OutputInt8, StaticInt8
from qcore.weights.qtensor import QTensor
from qcore.weights.quantizers import quantize
from qcore.weights.schemes import SCHEMES, Scheme


class TestLinearReference:
    @pytest.mark.parametrize("scheme", ALL_SCHEMES)
    def test_against_loops(self, scheme):
        names = ("m-above-k", "k-5", "vector", "bias", "strided-columns", "zero-rows", "batched-4d", "n-1")
        cases = [c for d in (torch.float32, torch.bfloat16) for c in linear_cases(scheme, d, *names)] or [
            c for c in LINEAR.cases([Scheme.parse("w8a8")], [torch.float32]) if c.scheme == scheme
        ]
        assert cases
        for case in cases:
            problem = case.build(0)
            found = LINEAR.reference(problem)
            assert found.shape == (*problem.x.shape[:-1], problem.request.n)
            expected = torch.tensor(brute_force_linear(problem), dtype=torch.float64).view(found.shape)
            if problem.request.output is not None:
                assert found.dtype == torch.int8
                # A sum that lies on a tie may fall to either side by the order of addition.
                assert (found.double() - expected).abs().max() <= 1
                assert (found.double() != expected).double().mean() < 0.01
            else:
                assert found.dtype == torch.float64
                assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9), case.id

    def test_a_written_out_example(self):
        weight = QTensor.from_codes(
            torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int8),
            torch.tensor([[0.5, 1.0], [2.0, 1.0]]),
            torch.tensor([[1, 0], [-1, 0]], dtype=torch.int8),
            Format("int4", 2, ZeroPoint.INT),
        )
        request = LinearRequest(CPU, torch.float32, torch.float32, 2, 3, 1, weight.format, None, None, True, False)
        problem = Problem(request, torch.tensor([[1.0, 10.0, 100.0]]), weight, torch.tensor([1000.0, 0.0]))
        # (1-1)/2 * 1 + (2-1)/2 * 10 + (3+1)*2 * 100 + 1000, and 4 + 50 + 600
        assert LINEAR.reference(problem).tolist() == [[1805.0, 654.0]]

    def test_static_example(self):
        weight = quantize(torch.tensor([[1.27, 0.0]]), "int8", "absmax")
        act, out = StaticInt8(0.5, 3), OutputInt8(1.0, -1)
        request = LinearRequest(CPU, torch.float32, torch.int8, 1, 2, 1, weight.format, act, out, False, False)
        # 1.25 / 0.5 = 2.5 rounds to 2: A(x) = 1.0, y = 1.27, round(1.27) - 1 = 0; 1000 is clipped to 124 steps.
        problem = Problem(request, torch.tensor([[1.25, 7.0], [1000.0, 0.0]]), weight)
        assert LINEAR.reference(problem).tolist() == [[0], [round(124 * 0.5 * 1.27) - 1]]

    def test_k_0_is_the_bias(self):
        weight = quantize(torch.zeros(2, 0), "int8")
        for act in (None, DynamicInt8(), DynamicInt8(symmetric=False), StaticInt8(0.1, 4)):
            request = LinearRequest(CPU, torch.float32, torch.float32, 2, 0, 3, weight.format, act, None, True, False)
            problem = Problem(request, torch.zeros(3, 0), weight, torch.tensor([1.0, 2.0]))
            assert LINEAR.reference(problem).tolist() == [[1.0, 2.0]] * 3
            assert LINEAR.judge(problem, torch.tensor([[1.0, 2.0]] * 3)).ok


class TestLinearTolerance:
    SOME = (
        "rows-17",
        "k-odd",
        "k-ragged",
        "bias-float32",
        "extreme-codes",
        "tiny-scales",
        "large-x",
        "outliers",
        "deep",
    )

    @pytest.mark.parametrize("scheme", ALL_SCHEMES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_right_kernel_passes(self, scheme, dtype):
        asked = "w8a8" if scheme in TOKEN else scheme
        for case in LINEAR.cases([Scheme.parse(asked)], [dtype]):
            # Every shape in float32; where x is narrow, those that differ.
            if case.scheme == scheme and (dtype == torch.float32 or shape_name(case) in self.SOME):
                problem = case.build(1)
                verdict = LINEAR.judge(problem, float32_kernel(problem))
                assert verdict.ok, f"{case.id}: {verdict.message}"
                assert verdict.worst <= (1.0 if problem.request.output else 0.75), f"{case.id}: {verdict.message}"

    @pytest.mark.parametrize("scheme", [s for s in SCHEMES if "a16" in s])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_weight_in_the_dtype_of_x_passes(self, scheme, dtype):
        for case in linear_cases(scheme, dtype):
            problem = case.build(2)
            verdict = LINEAR.judge(problem, float32_kernel(problem, narrow=dtype))
            assert verdict.ok, f"{case.id}: {verdict.message}"

    def test_a_sequential_float32_sum_passes(self):
        for scheme in ("w8a16", "w4a16-g128-asym"):
            (case,) = linear_cases(scheme, torch.float32, "deep")
            problem = case.build(0)
            dense, y = problem.weight.dequantize(torch.float32), torch.zeros(2, 48)
            for j in range(problem.request.k):
                y += problem.x[:, j : j + 1] * dense[:, j]
            assert LINEAR.judge(problem, y).worst < 0.75

    @pytest.mark.parametrize("scheme", ["w8a8", "w4a8-g32", "w8a8-static", "w8a8-aasym"])
    def test_a_reciprocal_instead_of_a_division_passes(self, scheme):
        for case in linear_cases(scheme, torch.bfloat16, "rows-33", "outliers", "large-x", "k-odd"):
            problem = case.build(3)
            x, act = problem.x.float().contiguous(), problem.request.activation
            if isinstance(act, StaticInt8):
                inverse, z, s = 1 / torch.tensor(act.scale), act.zero_point, act.scale
            elif act.symmetric:
                top = x.abs().amax(1, keepdim=True)
                inverse, z, s = 127 / top, 0, top * (1 / 127)
            else:
                low, high = x.amin(1, keepdim=True).clamp_max(0), x.amax(1, keepdim=True).clamp_min(0)
                inverse, s = 255 / (high - low), (high - low) * (1 / 255)
                z = torch.round(-128 - low * inverse)
            codes = (torch.round(x * inverse) + z).clamp(-128, 127) - z
            y = (grouped_integer_product(codes, problem.weight) * s).to(problem.request.out_dtype)
            assert LINEAR.judge(problem, y).ok, case.id


class TestLinearCatches:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("wrong", "scheme", "names"),
        [pytest.param(e, s, names, id=f"{e.__name__}-{s}") for e, schemes, names in ERRORS for s in schemes],
    )
    def test_wrong_kernels(self, wrong, scheme, names, dtype):
        cases = linear_cases(scheme, dtype, *names)
        assert len(cases) == len(names)
        for case in cases:
            problem = case.build(0)
            verdict = LINEAR.judge(problem, wrong(problem))
            assert not verdict.ok, f"{case.id}: {verdict.message}"
            assert verdict.worst > 1.5, f"{case.id}: {verdict.message}"
            assert "elements are off" in verdict.message

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "scheme", ["w8a16-asym", "w4a16-g128-asym", "w8a8", "w8a8-aasym", "w8a8-static", "w4a8-g32-asym"]
    )
    def test_the_probe_catches_them_too(self, scheme, dtype):
        request = LINEAR.request_for(Scheme.parse(scheme), CPU, dtype, 96, 300)
        if isinstance(request.activation, StaticInt8):
            request = replace(request, activation=StaticInt8(0.02, 5))
        request = replace(request, bias=True).small()
        problems = LINEAR.probe(request)
        assert all(LINEAR.judge(p, float32_kernel(p)).ok for p in problems)
        wrongs = [dropped_bias, one_code_off]
        wrongs += [flipped_zero] if "-asym" in scheme else []
        wrongs += [wrong_group] if "-g" in scheme else []
        for wrong in wrongs:
            assert not all(LINEAR.judge(p, wrong(p)).ok for p in problems), wrong.__name__
        assert {p.x.shape[0] > p.request.k for p in LINEAR.probe(replace(request, k=32))} == {False, True}

    def test_activations_left_in_float_where_int8_was_asked(self):
        for scheme in ("w8a8", "w8a8-static", "w4a8-g32"):
            for case in linear_cases(scheme, torch.float32, "rows-16", "outliers"):
                problem = case.build(0)
                floating = replace(problem, request=replace(problem.request, activation=None))
                assert not LINEAR.judge(problem, float32_kernel(floating)).ok

    def test_int8_output(self):
        (case,) = linear_cases("w8a8-static-o8", torch.float32, "rows-16")
        problem = case.build(0)
        y = LINEAR.reference(problem)
        assert LINEAR.judge(problem, (y + (y < 100)).to(torch.int8)).ok
        assert not LINEAR.judge(problem, (y - 3 * (y > -100)).to(torch.int8)).ok

    def test_scales_flushed_to_zero(self):
        for case in linear_cases("w8a16", torch.float32, "tiny-scales"):
            problem = case.build(0)
            assert not LINEAR.judge(problem, torch.zeros(4, 16)).ok


class TestJudge:
    @pytest.fixture
    def problem(self):
        (case,) = linear_cases("w8a16", torch.float32, "rows-2")
        return case.build(0)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda y: y.double(), "returned dtype torch.float64 instead of torch.float32"),
            (lambda y: y.half(), "returned dtype torch.float16"),
            (lambda y: y.t(), r"returned shape \(32, 2\) instead of \(2, 32\)"),
            (lambda y: y[:1], "returned shape"),
            (lambda y: y.tolist(), "returned list instead of a tensor"),
            (lambda y: None, "returned NoneType"),
            (lambda y: y.to("meta"), "a tensor on meta instead of cpu"),
            (lambda y: y * float("nan"), "got nan"),
            (lambda y: y / 0, "got -?inf"),
            (lambda y: -y, "elements are off"),
        ],
    )
    def test_wrong(self, problem, change, says):
        verdict = LINEAR.judge(problem, change(float32_kernel(problem)))
        assert not verdict.ok
        assert verdict.worst > 1
        assert re.search(says, verdict.message)

    def test_one_wrong_element_is_found_and_named(self, problem):
        y = float32_kernel(problem)
        y[1, 7] += 1
        verdict = LINEAR.judge(problem, y)
        assert not verdict.ok
        assert verdict.message.startswith("at (1, 7): got")
        assert verdict.message.endswith("1 of 64 elements are off")

    def test_one_nan_is_infinitely_wrong(self, problem):
        y = float32_kernel(problem)
        y[0, 3] = float("nan")
        assert LINEAR.judge(problem, y).worst == float("inf")
        y[0, 3] = float("inf")
        assert LINEAR.judge(problem, y).worst == float("inf")

    def test_a_result_with_gradient_is_judged(self, problem):
        assert LINEAR.judge(problem, float32_kernel(problem).requires_grad_()).ok

    def test_nothing_is_right_for_no_rows(self):
        (case,) = linear_cases("w4a8-g32", torch.bfloat16, "rows-0")
        problem = case.build(0)
        assert LINEAR.judge(problem, torch.empty(0, 32, dtype=torch.bfloat16)).ok
        assert not LINEAR.judge(problem, torch.empty(0, 31, dtype=torch.bfloat16)).ok
        assert not LINEAR.judge(problem, torch.empty(0, 32)).ok

    @staticmethod
    def overflowing(value: float) -> Problem:
        """A product of ``value`` for float16, whose largest number is 65504 and whose Inf begins at 65520."""
        weight = QTensor.from_codes(torch.ones(1, 1, dtype=torch.int8), torch.full((1, 1), value), None, Format("int8"))
        request = LinearRequest(CPU, torch.float16, torch.float16, 1, 1, 1, weight.format, None, None, False, False)
        return Problem(request, torch.ones(1, 1, dtype=torch.float16), weight)

    @pytest.mark.parametrize(
        ("exact", "got", "ok"),
        [
            (1e6, float("inf"), True),
            (1e6, 65504.0, False),
            (1e6, float("-inf"), False),
            (-1e6, float("-inf"), True),
            (65500.0, float("inf"), True),  # within the error allowed to the sum
            (60000.0, float("inf"), False),
            (65521.0, 65504.0, True),
            (1e6, float("nan"), False),
        ],
    )
    def test_overflow(self, exact, got, ok):
        assert LINEAR.judge(self.overflowing(exact), torch.full((1, 1), got, dtype=torch.float16)).ok is ok

    def test_a_result_beside_a_tie_is_rounded_where_it_lies(self):
        """x of half a step: the code 0 gives y = 0; 1, allowed as well, 1.0117, which bfloat16 rounds to 1.0156."""
        weight = QTensor.from_codes(
            torch.ones(1, 1, dtype=torch.int8), torch.full((1, 1), 1 + 3 / 256), None, Format("int8")
        )
        static = StaticInt8(scale=1.0, zero_point=0)
        request = LinearRequest(CPU, torch.bfloat16, torch.bfloat16, 1, 1, 1, weight.format, static, None, False, False)
        problem = Problem(request, torch.full((1, 1), 0.5, dtype=torch.bfloat16), weight)
        assert LINEAR.judge(problem, torch.full((1, 1), 1.015625, dtype=torch.bfloat16)).ok
        assert not LINEAR.judge(problem, torch.full((1, 1), 1.0703125, dtype=torch.bfloat16)).ok

    def test_nan_in_x_must_come_out(self):
        problem = self.overflowing(1.0)
        problem = replace(problem, x=problem.x * float("nan"))
        assert LINEAR.judge(problem, torch.full((1, 1), float("nan"), dtype=torch.float16)).ok
        assert not LINEAR.judge(problem, torch.zeros(1, 1, dtype=torch.float16)).ok


class TestConv2d:
    @pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g32-asym", "w4a16-g32-fzp"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_reference_is_torchs_convolution(self, scheme, dtype):
        for case in conv_cases(scheme, dtype):
            problem = case.build(0)
            r = problem.request
            kernel = dense_kernel(problem.weight, r, torch.float64)
            assert kernel.shape == (r.out_channels, r.in_channels // r.groups, *r.kernel_size)
            bias = None if problem.bias is None else problem.bias.double()
            expected = torch.nn.functional.conv2d(problem.x.double(), kernel, bias, **geometry(r))
            found = CONV2D.reference(problem)
            assert found.shape == expected.shape, case.id
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9), case.id
            narrow = None if bias is None else bias.float()
            right = torch.nn.functional.conv2d(problem.x.float(), kernel.float(), narrow, **geometry(r))
            verdict = CONV2D.judge(problem, right.to(dtype))
            assert verdict.worst <= 0.75, f"{case.id}: {verdict.message}"

    def test_im2col_by_index_arithmetic(self):
        for case in conv_cases("w8a16"):
            problem = case.build(0)
            found = im2col(problem.x, problem.request)
            expected = torch.tensor(loop_columns(problem.x, problem.request), dtype=torch.float32)
            assert torch.equal(found, expected.view(found.shape)), case.id

    @pytest.mark.parametrize("scheme", ["w8a8-static", "w8a8-static-o8", "w4a8-g32-static"])
    def test_static_activations_are_torchs_conv_of_quantized_x(self, scheme):
        for case in conv_cases(scheme):
            problem = case.build(0)
            r = problem.request
            s, z = r.activation.scale, r.activation.zero_point
            codes = problem.x if problem.x.dtype == torch.int8 else (torch.round(problem.x / F(s)) + z).clamp(-128, 127)
            x = (codes.double() - z) * float(F(s))
            bias = None if problem.bias is None else problem.bias.double()
            y = torch.nn.functional.conv2d(x, dense_kernel(problem.weight, r, torch.float64), bias, **geometry(r))
            found = CONV2D.reference(problem)
            if r.output is None:
                assert torch.allclose(found, y, rtol=1e-9, atol=1e-9), case.id
            else:
                codes = (torch.round(y / float(F(r.output.scale))) + r.output.zero_point).clamp(-128, 127)
                assert found.numel() == 0 or (found.double() - codes).abs().max() <= 1, case.id

    @pytest.mark.parametrize("scheme", ["w8a8", "w8a8-aasym", "w4a8-g32-asym"])
    def test_dynamic_activations_take_a_receptive_field_for_a_token(self, scheme):
        for case in conv_cases(scheme):
            problem = case.build(0)
            r = problem.request
            w = dense_weight(problem.weight)
            size = r.out_channels // r.groups
            expected = []
            for fields in loop_columns(problem.x, r):
                tokens = activation_values(problem, np.array(fields, dtype=F))
                expected.append(
                    [math.fsum(a * b for a, b in zip(tokens[i // size], w[i], strict=True)) for i in range(r.n)]
                )
            y = torch.tensor(expected, dtype=torch.float64).view(-1, r.n)
            y = y if problem.bias is None else y + problem.bias.double()
            found = CONV2D.reference(problem).movedim(1, -1).reshape(-1, r.n)
            assert torch.allclose(found, y, rtol=1e-9, atol=1e-9), case.id

    def test_codes_are_padded_with_the_zero_point(self):
        weight = quantize(torch.ones(1, 9), "int8")
        sizes = (1, 1, (3, 3), (1, 1), (1, 1), (1, 1), 1)
        act = StaticInt8(0.5, 7)
        request = Conv2dRequest(CPU, torch.int8, torch.float32, *sizes, weight.format, act, None, False, False)
        problem = Problem(request, torch.full((1, 1, 2, 2), 9, dtype=torch.int8), weight)
        # Four pixels of (9 - 7) * 0.5 = 1 each; the border is the value 0.
        assert torch.allclose(CONV2D.reference(problem), torch.full((1, 1, 2, 2), 4.0, dtype=torch.float64))

    @pytest.mark.parametrize("wrong", ["columns", "bias", "groups", "padding", "zero"])
    def test_wrong_kernels_are_caught(self, wrong):
        caught = 0
        for case in conv_cases("w4a16-g32-asym"):
            problem = case.build(0)
            r = problem.request
            kernel, bias = problem.weight.dequantize(torch.float32), problem.bias
            bias = None if bias is None else bias.float()
            shape, options = (r.n, *r.kernel_size, -1), geometry(r)
            if wrong == "columns":  # read in (IC, KH, KW) order
                dense = kernel.view(r.n, -1, *r.kernel_size)
                applies = r.k > max(math.prod(r.kernel_size), r.in_channels // r.groups)
            else:
                dense, applies = kernel.view(shape).permute(0, 3, 1, 2), False
            if wrong == "bias":
                bias, applies = None, problem.bias is not None
            if wrong == "groups":
                dense, applies = dense.roll(r.n // r.groups, 0), r.groups > 1
            if wrong == "zero":
                zero = (-problem.weight.zero.int()).clamp(-8, 7).to(torch.int8)
                flipped = QTensor(problem.weight.data, problem.weight.scale, zero, problem.weight.shape, r.weight)
                dense, applies = dense_kernel(flipped, r, torch.float32), True
            x = problem.x
            if wrong == "padding" and max(r.padding):
                x = torch.nn.functional.pad(x, (r.padding[1],) * 2 + (r.padding[0],) * 2, value=0.5)
                options, applies = {**options, "padding": 0}, True
            if applies and x.shape[0]:
                caught += 1
                assert not CONV2D.judge(problem, torch.nn.functional.conv2d(x, dense, bias, **options)).ok, case.id
        assert caught >= 2

    @pytest.mark.parametrize("scheme", ["w8a16", "w8a8", "w4a8-g32-asym"])
    def test_probe(self, scheme):
        for case in conv_cases(scheme):
            request = case.build(0).request.small()
            for problem in CONV2D.probe(request):
                assert CONV2D.judge(problem, CONV2D.reference(problem).float()).ok
                assert min(problem.x.shape) > 0
                assert CONV2D.reference(problem).numel()

    @pytest.mark.parametrize("size", [(7, 6), (12, 11), (5, 5)])
    def test_output_size(self, size):
        for case in conv_cases("w8a16"):
            r = case.build(0).request
            reach = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(r.dilation, r.kernel_size, r.padding, strict=True)]
            if size[0] < reach[0] or size[1] < reach[1]:
                continue
            layer = torch.nn.Conv2d(r.in_channels, r.n, r.kernel_size, **geometry(r), device="meta")
            expected = layer(torch.empty(1, r.in_channels, *size, device="meta")).shape[2:]
            assert output_size(r, *size) == tuple(expected)
            assert convolved_size(size, r.kernel_size, r.stride, r.padding, r.dilation) == tuple(expected)

    def test_an_image_smaller_than_the_kernel_has_sizes_below_1(self):
        none, one = (0, 0), (1, 1)
        assert convolved_size([2, 9], [3, 3], one, none, one) == (0, 7)
        assert convolved_size([9, 2], [3, 3], one, none, (2, 2)) == (5, -2)

    def test_every_size_is_height_and_width(self):
        with pytest.raises(ValueError, match="unpack"):
            convolved_size((5, 5), (3,), (1, 1), (0, 0), (1, 1))

    def request(self, **changes):
        fields = {"in_channels": 6, "out_channels": 4, "kernel_size": (3, 2), "groups": 2}
        fields |= {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
        form = {"weight": Format("int8"), "activation": None, "output": None, "bias": False, "training": True}
        return Conv2dRequest(CPU, torch.float32, torch.float32, **{**fields, **form, **changes})

    def test_request(self):
        request = self.request()
        assert (request.n, request.k) == (4, 18)
        assert not request.small().training
        assert contract_of(request) is CONV2D

    @pytest.mark.parametrize("changes", [{"groups": 4}, {"groups": 0}, {"in_channels": 5}, {"out_channels": 3}])
    def test_sizes_that_do_not_fit(self, changes):
        with pytest.raises(FormatError, match="must divide in_channels"):
            self.request(**changes)

    def test_per_token_parameters_are_for_linear(self):
        with pytest.raises(FormatError, match="for linear only"):
            self.request(activation=StaticInt8(per_token=True))
        assert not list(CONV2D.cases([Scheme.parse("w8a8-token")], [torch.float32]))
