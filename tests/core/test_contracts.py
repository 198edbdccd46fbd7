"""The contracts: references against brute-force loops, tolerances against right and deliberately wrong kernels."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from qcore.activations import DynamicInt8, OutputInt8, StaticInt8
from qcore.contracts import (
    CONTRACTS,
    CONV2D,
    EMBEDDING,
    GIVEN_NAMES,
    LINEAR,
    Conv2dRequest,
    EmbeddingRequest,
    LinearRequest,
    Problem,
    contract_of,
)
from qcore.contracts.conv2d import dense_kernel, im2col, output_size
from qcore.contracts.inputs import small_k, small_n
from qcore.errors import FormatError
from qcore.formats import Format, ZeroPoint
from qcore.qtensor import QTensor
from qcore.quantize import quantize
from qcore.schemes import SCHEMES, Scheme

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """The problems are small: threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


F = np.float32


def shape_name(case) -> str:
    """``rows-16`` of ``linear[w8a16-float32-rows-16]``."""
    return case.id.split("float32-")[-1].split("float16-")[-1].rstrip("]")


def linear_cases(scheme: str, dtype: torch.dtype, *names: str):
    wanted = [c for c in LINEAR.cases([Scheme.parse(scheme)], [dtype]) if c.scheme == scheme]
    return [c for c in wanted if not names or shape_name(c) in names]


# Independent arithmetic -----------------------------------------------------------------------------------------------


def parameters(problem: Problem, prefix: str, token: int) -> tuple[float, int]:
    part = problem.request.activation if prefix == "x" else problem.request.output
    if part.per_token:
        return float(problem.given[f"{prefix}_scale"][token]), int(problem.given[f"{prefix}_zero_point"][token])
    return float(F(part.scale)), part.zero_point


def quantized(problem: Problem, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centred codes ``(rows, K)`` and scales ``(rows, 1)`` of A(x), in float32 as the design says; in numpy."""
    act, wide = problem.request.activation, rows.astype(F)
    low = np.minimum(wide.min(1, keepdims=True, initial=0), F(0))
    high = np.maximum(wide.max(1, keepdims=True, initial=0), F(0))
    if isinstance(act, DynamicInt8):
        s = np.maximum(-low, high) / F(127) if act.symmetric else (high - low) / F(255)
        s = np.where(s == 0, F(1), s)
        z = np.zeros_like(s) if act.symmetric else np.round(F(-128) - low / s)
    else:
        pairs = np.array([parameters(problem, "x", token) for token in range(len(rows))], dtype=F).reshape(-1, 2)
        s, z = pairs[:, :1], pairs[:, 1:]
    codes = wide if rows.dtype == np.int8 else np.clip(np.round(wide / s) + z, F(-128), F(127))
    return codes.astype(np.float64) - z, s


def activation_values(problem: Problem, rows: np.ndarray) -> list[list[float]]:
    """A(x), row by row."""
    if problem.request.activation is None:
        return rows.tolist()
    codes, scale = quantized(problem, rows)
    return (codes * scale.astype(np.float64)).tolist()


def dense_weight(weight: QTensor) -> list[list[float]]:
    codes, scale = weight.codes().tolist(), weight.scale.double().tolist()
    zero = weight.integer_zero() if weight.format.zero is ZeroPoint.INT else weight.zero
    zeros = None if zero is None else zero.double().tolist()
    n, k = weight.shape
    g = weight.format.group_size or max(k, 1)

    def value(i: int, j: int) -> float:
        q, s = codes[i][j], scale[j // g][i]
        if zeros is None:
            return q * s
        z = zeros[j // g][i]
        return (q - z) * s if weight.format.zero is ZeroPoint.INT else q * s + z

    return [[value(i, j) for j in range(k)] for i in range(n)]


def brute_force_linear(problem: Problem) -> list[list[float]]:
    """Loops over rows, outputs and columns."""
    w = dense_weight(problem.weight)
    bias = [0.0] * len(w) if problem.bias is None else problem.bias.double().tolist()
    x = problem.x.reshape(-1, problem.request.k)
    rows = (x if x.dtype == torch.int8 else x.float()).numpy()
    result = []
    for token, a in enumerate(activation_values(problem, rows)):
        y = [dot(a, line) + b for line, b in zip(w, bias, strict=True)]
        if problem.request.output is not None:
            s, z = parameters(problem, "out", token)
            y = [max(-128, min(127, round(v / s) + z)) for v in y]
        result.append(y)
    return result


def float32_kernel(problem: Problem, narrow: torch.dtype = torch.float32) -> torch.Tensor:
    """What a decent kernel computes: one float32 product, scales in float32, one rounding.

    ``narrow``: the dtype that the dense weight of a float product is rounded to.
    """
    request, weight = problem.request, problem.weight
    x = problem.x.reshape(problem.x.shape[:-1].numel(), request.k)
    dense = weight.dequantize(torch.float32)
    act = request.activation
    if act is None:
        y = x.float() @ dense.to(narrow).float().t()
    else:
        codes, scale = quantized(problem, (x if x.dtype == torch.int8 else x.float()).numpy())
        y = grouped_integer_product(torch.from_numpy(codes), weight) * torch.from_numpy(scale)
    if problem.bias is not None:
        y = y + problem.bias.float()
    if request.output is not None:
        pairs = [parameters(problem, "out", token) for token in range(x.shape[0])]
        s, z = (torch.tensor([p[i] for p in pairs], dtype=torch.float32).view(-1, 1) for i in (0, 1))
        return (torch.round(y / s) + z).clamp(-128, 127).to(torch.int8).view(*problem.x.shape[:-1], request.n)
    return y.to(request.out_dtype).view(*problem.x.shape[:-1], request.n)


def grouped_integer_product(codes: torch.Tensor, weight: QTensor) -> torch.Tensor:
    """Exact per group, scales in float32, summed in float32."""
    g = weight.format.group_size or max(1, weight.shape[1])
    y = torch.zeros(codes.shape[0], weight.shape[0])
    for group, (a, q) in enumerate(zip(codes.split(g, 1), weight.codes().split(g, 1), strict=True)):
        zero = weight.integer_zero()
        centred = q.double() if zero is None else q.double() - zero[group].double().unsqueeze(1)
        y += (a.double() @ centred.t()).float() * weight.scale[group].float()
        if weight.format.zero is ZeroPoint.FLOAT:
            y += a.double().sum(1, keepdim=True).float() * weight.zero[group].float()
    return y


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(p * q for p, q in zip(a, b, strict=True))


# linear ---------------------------------------------------------------------------------------------------------------

TOKEN = ["w4a8-g32-asym-token", "w4a8-g32-asym-token-o8t"]
ALL_SCHEMES = [*SCHEMES, *TOKEN]


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


def reweighted(problem: Problem, **changes) -> torch.Tensor:
    fields = {name: getattr(problem.weight, name) for name in ("data", "scale", "zero", "shape", "format")}
    return float32_kernel(replace(problem, weight=QTensor(**{**fields, **changes})))


def flipped_zero(problem):
    zero = problem.weight.zero
    low, high = problem.weight.format.code_range
    return reweighted(
        problem, zero=-zero if zero.is_floating_point() else (-zero.int()).clamp(low, high).to(torch.int8)
    )


def dropped_zero(problem):
    return reweighted(problem, zero=torch.zeros_like(problem.weight.zero))


def wrong_group(problem):
    return reweighted(problem, scale=problem.weight.scale.roll(1, 0).clone())


def transposed_scale(problem):
    g, n = problem.weight.scale.shape
    return reweighted(problem, scale=problem.weight.scale.t().reshape(g, n).clone())


def swapped_nibbles(problem):
    data = problem.weight.data
    return reweighted(problem, data=(data << 4) | (data >> 4))


def dropped_bias(problem):
    return float32_kernel(replace(problem, bias=None))


def bias_twice(problem):
    return float32_kernel(replace(problem, bias=2 * problem.bias))


def dropped_last_column(problem):
    x = problem.x.clone()
    x[..., -1] = 0
    if problem.request.activation is None:
        return float32_kernel(replace(problem, x=x))
    codes = problem.weight.codes().clone()
    codes[:, -1] = 0 if problem.weight.integer_zero() is None else problem.weight.integer_zero()[-1]
    zero = problem.weight.integer_zero()
    return float32_kernel(
        replace(problem, weight=QTensor.from_codes(codes, problem.weight.scale, zero, problem.weight.format))
    )


def one_code_off(problem):
    codes = problem.weight.codes().clone()
    low, high = problem.weight.format.code_range
    j = int(problem.x.reshape(-1, problem.request.k).float().abs().sum(0).argmax())
    codes[0, j] = low if codes[0, j] > (low + high) // 2 else high
    weight = problem.weight
    zero = weight.integer_zero() if weight.format.zero is ZeroPoint.INT else weight.zero
    return float32_kernel(replace(problem, weight=QTensor.from_codes(codes, weight.scale, zero, weight.format)))


def rows_beyond_k_repeat(problem):
    y, k = float32_kernel(problem), problem.request.k
    return y[torch.arange(y.shape[0]) % k]


def last_row_left_out(problem):
    y = float32_kernel(problem).clone()
    y[-1] = 0
    return y


def strides_ignored(problem):
    x = problem.x
    flat = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return float32_kernel(replace(problem, x=flat[: x.numel()].view(x.shape)))


def float_zero_rows(problem):
    y = float32_kernel(problem).clone()
    y[::2] = float("nan")
    return y


ERRORS = [
    (
        flipped_zero,
        ("w8a16-asym", "w8a16-g32-asym", "w4a16-g128-asym", "w4a16-g32-fzp", "w4a8-g32-asym"),
        ("rows-16", "k-odd", "n-12"),
    ),
    (dropped_zero, ("w8a16-asym", "w4a16-asym", "w4a16-g32-fzp", "w4a8-asym", "w8a8-g64-asym"), ("rows-2", "k-ragged")),
    (
        wrong_group,
        ("w8a16-g32", "w4a16-g128", "w4a16-g32-fzp", "w4a8-g32", "w8a8-g64"),
        ("rows-16", "deep", "k-ragged"),
    ),
    (transposed_scale, ("w8a16-g32", "w4a16-g128-asym", "w4a8-g32"), ("rows-16", "k-ragged")),
    (swapped_nibbles, ("w4a16", "w4a16-g128-asym", "w4a8-g32"), ("rows-1", "n-3", "k-ragged")),
    (
        dropped_bias,
        ("w8a16", "w4a16-g128-asym", "w8a8", "w8a8-static", "w4a8-g32"),
        ("bias", "bias-float32", "bias-ragged"),
    ),
    (bias_twice, ("w8a16", "w8a8"), ("bias", "bias-float32", "bias-ragged")),
    (dropped_last_column, ("w8a16", "w4a16-g128-asym", "w8a8", "w4a8-g32"), ("k-odd", "k-5", "strided-odd")),
    (
        one_code_off,
        ("w8a16", "w8a16-asym", "w4a16-g128", "w4a16-g128-asym", "w8a8", "w4a8-g32-asym"),
        ("rows-16", "k-5", "n-1"),
    ),
    (rows_beyond_k_repeat, ("w8a16", "w4a16-g128", "w8a8", "w4a8-g32"), ("m-above-k", "m-above-k-wide")),
    (last_row_left_out, ("w8a16", "w4a16-g128", "w8a8", "w8a8-static-o8"), ("rows-17", "rows-33", "m-above-k")),
    (strides_ignored, ("w8a16", "w4a16-g128", "w8a8"), ("strided-columns", "strided-rows", "strided-odd")),
    (float_zero_rows, ("w8a8", "w8a8-aasym"), ("zero-rows",)),
]


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

    def test_nan_in_x_must_come_out(self):
        problem = self.overflowing(1.0)
        problem = replace(problem, x=problem.x * float("nan"))
        assert LINEAR.judge(problem, torch.full((1, 1), float("nan"), dtype=torch.float16)).ok
        assert not LINEAR.judge(problem, torch.zeros(1, 1, dtype=torch.float16)).ok


# conv2d ---------------------------------------------------------------------------------------------------------------


def conv_cases(scheme: str, dtype: torch.dtype = torch.float32):
    return list(CONV2D.cases([Scheme.parse(scheme)], [dtype]))


def geometry(request: Conv2dRequest) -> dict:
    names = ("stride", "padding", "dilation", "groups")
    return {name: getattr(request, name) for name in names}


def loop_columns(x: torch.Tensor, r: Conv2dRequest) -> list[list[list[float]]]:
    """Receptive fields by index arithmetic, columns in (KH, KW, IC) order: [position][group][column]."""
    b, c, h, w = x.shape
    per, values = c // r.groups, x.tolist()
    sizes = zip((h, w), r.padding, r.dilation, r.kernel_size, r.stride, strict=True)
    oh, ow = ((s + 2 * p - d * (k - 1) - 1) // t + 1 for s, p, d, k, t in sizes)
    found = []
    for i in range(b):
        for top in range(oh):
            for left in range(ow):
                fields = []
                for group in range(r.groups):
                    field = []
                    for dy in range(r.kernel_size[0]):
                        for dx in range(r.kernel_size[1]):
                            row = top * r.stride[0] - r.padding[0] + dy * r.dilation[0]
                            col = left * r.stride[1] - r.padding[1] + dx * r.dilation[1]
                            inside = 0 <= row < h and 0 <= col < w
                            field += [values[i][group * per + ic][row][col] if inside else 0.0 for ic in range(per)]
                    fields.append(field)
                found.append(fields)
    return found


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
    def test_static_activations_are_torchs_convolution_of_quantized_x(self, scheme):
        for case in conv_cases(scheme):
            problem = case.build(0)
            r = problem.request
            s, z = r.activation.scale, r.activation.zero_point
            x = ((torch.round(problem.x / F(s)) + z).clamp(-128, 127).double() - z) * float(F(s))
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


# embedding ------------------------------------------------------------------------------------------------------------


class TestEmbedding:
    @pytest.mark.parametrize("scheme", [s for s in SCHEMES if "a16" in s])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_reference_and_tolerance(self, scheme, dtype):
        for case in EMBEDDING.cases([Scheme.parse(scheme)], [dtype]):
            problem = case.build(0)
            table = torch.tensor(dense_weight(problem.weight), dtype=torch.float64)
            expected = table[problem.x.long()]
            found = EMBEDDING.reference(problem)
            assert found.shape == (*problem.x.shape, problem.request.embedding_dim)
            assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12), case.id
            right = problem.weight.dequantize(torch.float32)[problem.x.long()].to(dtype)
            assert EMBEDDING.judge(problem, right).worst <= 0.75, case.id

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("scheme", ["w8a16-asym", "w4a16-g32-fzp", "w4a16-g128-asym"])
    def test_wrong_kernels_are_caught(self, scheme, dtype):
        for case in EMBEDDING.cases([Scheme.parse(scheme)], [dtype]):
            problem = case.build(0)
            if shape_name(case) not in {"batched", "many", "odd-d", "ragged"}:
                continue
            weight, index = problem.weight, problem.x.long()
            zero = torch.zeros_like(weight.zero)
            unshifted = QTensor(weight.data, weight.scale, zero, weight.shape, weight.format)
            rolled = weight.dequantize(dtype).roll(1, 0)[index]
            shortened = weight.dequantize(dtype)[index]
            shortened[..., -1] = 0
            for wrong in (unshifted.dequantize(dtype)[index], rolled, shortened):
                assert not EMBEDDING.judge(problem, wrong).ok, case.id

    def test_rounding_twice_is_caught(self):
        (case,) = (c for c in EMBEDDING.cases([Scheme.parse("w8a16")], [torch.float32]) if shape_name(c) == "many")
        problem = case.build(0)
        assert not EMBEDDING.judge(problem, problem.weight.dequantize(torch.bfloat16).float()[problem.x]).ok

    def test_probe_and_request(self):
        request = EmbeddingRequest(CPU, torch.bfloat16, 30522, 384, Format("int4", 32))
        assert (request.n, request.k, contract_of(request)) == (30522, 384, EMBEDDING)
        small = request.small()
        assert small.n <= 128
        (problem,) = EMBEDDING.probe(small)
        assert EMBEDDING.judge(problem, EMBEDDING.reference(problem).bfloat16()).ok
        assert small.signature() == request.signature()


# what they share ------------------------------------------------------------------------------------------------------


class TestCases:
    @pytest.mark.parametrize("contract", CONTRACTS.values(), ids=str)
    def test_ids_are_unique_and_every_scheme_is_covered(self, contract):
        schemes = [Scheme.parse(text) for text in SCHEMES]
        cases = list(contract.cases(schemes, DTYPES))
        assert max(Counter(case.id for case in cases).values()) == 1
        assert {case.contract for case in cases} == {contract.name}
        wanted = {s for s in SCHEMES if contract is not EMBEDDING or "a16" in s}
        assert wanted <= {case.scheme for case in cases}
        assert contract.hook == f"qcore_{contract.name}"
        assert "Errors:" in type(contract).__doc__

    def test_schemes_that_were_not_asked_for_stay_out(self):
        for contract in CONTRACTS.values():
            assert {c.scheme for c in contract.cases([Scheme.parse("w8a16")], [torch.float32])} == {"w8a16"}

    def test_calibrated_schemes_keep_their_numbers(self):
        case = next(LINEAR.cases([Scheme.parse("w8a8-static(0.5,7)")], [torch.float32]))
        assert case.scheme == "w8a8-static"
        assert case.build(0).request.activation == StaticInt8(0.5, 7)

    def test_the_shapes_of_the_design(self):
        problems = [c.build(0) for c in linear_cases("w4a16-g128-asym", torch.float32)]
        rows = {p.x.shape[:-1].numel() for p in problems}
        assert {0, 1, 2, 15, 16, 17, 31, 33, 256} <= rows
        assert any(p.x.shape[0] > p.request.k for p in problems if p.x.dim() == 2)
        assert {5, 77} <= {p.request.k for p in problems}
        assert any(p.request.k % 128 and p.request.k > 128 for p in problems)
        assert {1, 3, 12, 20, 129} <= {p.request.n for p in problems}
        assert any(p.x.dim() == 3 for p in problems)
        assert any(not p.x.is_contiguous() for p in problems)
        assert any((p.weight.dequantize().abs().amax(1) == 0).any() for p in problems)
        bf16 = [c.build(0) for c in linear_cases("w4a16-g128-asym", torch.bfloat16)]
        assert {p.bias.dtype for p in bf16 if p.bias is not None} == {torch.bfloat16, torch.float32}

    @pytest.mark.parametrize("text", ["w8a16", "w4a16-g128"])
    def test_zero_groups_leave_something(self, text):
        (case,) = linear_cases(text, torch.float32, "zero-groups")
        dense = case.build(0).weight.dequantize()
        assert (dense[::2] == 0).all()
        assert (dense[1::2] != 0).any()

    def test_the_same_seed_gives_the_same_numbers(self):
        for contract in CONTRACTS.values():
            case = next(
                c
                for c in contract.cases([Scheme.parse("w8a16")], [torch.float32])
                if "empty" not in c.id and "rows-0" not in c.id
            )
            a, b, other = case.build(3), case.build(3), case.build(4)
            assert torch.equal(a.x, b.x)
            assert torch.equal(a.weight.data, b.weight.data)
            assert not torch.equal(a.weight.data, other.weight.data)

    def test_given_parameters_only_for_per_token_schemes(self):
        for case in LINEAR.cases([Scheme.parse("w8a8")], [torch.float32]):
            problem = case.build(0)
            given = {"w4a8-g32-asym-token": GIVEN_NAMES[:2], "w4a8-g32-asym-token-o8t": GIVEN_NAMES}.get(
                case.scheme, ()
            )
            assert set(problem.given) == set(given)
            assert all(t.shape == (problem.x.shape[:-1].numel(),) for t in problem.given.values())

    def test_a_problem_moves_with_its_strides(self):
        (case,) = linear_cases("w4a16-g32-fzp", torch.float32, "strided-columns")
        problem = case.build(0)
        moved = problem.to(torch.device("meta"))
        assert (moved.x.stride(), moved.x.device.type, moved.weight.device.type) == (problem.x.stride(), "meta", "meta")
        again = problem.to(CPU)
        assert torch.equal(again.x, problem.x)
        assert not again.x.is_contiguous()


class TestSmall:
    @pytest.mark.parametrize("group", [None, 1, 7, 32, 96, 100, 128, 1024])
    @pytest.mark.parametrize("k", [1, 5, 77, 255, 256, 300, 768, 960, 4096, 11008, 12345, 65536])
    def test_remainders_of_k_are_kept(self, k, group):
        fmt = Format("int4", group)
        small = small_k(k, fmt)
        assert small <= k
        assert small % 256 == k % 256
        if group is not None:
            assert small % group == k % group
            assert min(fmt.groups(small), 2) == min(fmt.groups(k), 2)
        assert small_k(small, fmt) == small or group is not None

    @pytest.mark.parametrize("n", [0, 1, 12, 63, 64, 65, 129, 4096, 30522])
    def test_remainders_of_n_are_kept(self, n):
        assert small_n(n) <= min(n, 127)
        assert small_n(n) % 64 == n % 64

    def test_signature_leaves_out_sizes_and_numbers(self):
        scheme = Scheme.parse("w8a8-static(0.5,3)")
        request = LINEAR.request_for(scheme, CPU, torch.float32, 4096, 4096)
        other = LINEAR.request_for(Scheme.parse("w8a8-static(0.25,1)"), CPU, torch.float32, 8192, 4096)
        assert request.signature() == other.signature() == request.small().signature()
        assert request.signature() != replace(request, bias=True).signature()
        assert request.signature() != replace(request, k=4097).signature()
        assert request.signature() != LINEAR.request_for(scheme, CPU, torch.float16, 4096, 4096).signature()
        assert (request.small().rows, request.small().training) == (None, False)

    def test_request_for(self):
        for contract in CONTRACTS.values():
            request = contract.request_for(Scheme.parse("w8a16"), CPU, torch.bfloat16, 24, 40)
            assert isinstance(request, contract.request)
            assert (request.n, request.k, request.out_dtype) == (24, 40, torch.bfloat16)
            assert contract_of(request) is contract
        token = LINEAR.request_for(Scheme.parse("w4a8-g32-token-o8t"), CPU, torch.float32, 8, 64)
        assert (token.x_dtype, token.out_dtype) == (torch.int8, torch.int8)
