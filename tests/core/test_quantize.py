"""Quantizers, recomputed one group at a time in numpy from the formulas of the design."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from qcore.errors import FormatError, QcoreWarning
from qcore.formats import Format, ZeroPoint
from qcore.weights.quantizers import NEEDS_MOMENTS, QUANTIZERS, checked_quantizer, default_quantizer, quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
F = np.float32


def stored(value: F, dtype: torch.dtype) -> F:
    """A float32 rounded to a narrower dtype."""
    return F(torch.tensor(float(value), dtype=torch.float32).to(dtype).float().item())


def scale_of(exact: F, dtype: torch.dtype) -> F:
    """A scale as it is stored: floored at the smallest normal, and 1 for a group without extent."""
    return F(1) if exact == 0 else stored(max(exact, F(torch.finfo(dtype).smallest_normal)), dtype)


def expected_group(w: np.ndarray, fmt: Format, quantizer: str, dtype: torch.dtype) -> tuple[list[int], F, F]:
    """Codes, scale and zero point of one group, all in float32; `round` of numpy is half to even."""
    low, high = fmt.code_range
    if quantizer == "absmax":
        s = scale_of(F(np.abs(w).max()) / F(high), dtype)
        return np.clip(np.round(w / s), -high, high).astype(int).tolist(), s, F(0)
    if quantizer == "absmax_full":
        s = scale_of(max(w.max() / F(high), w.min() / F(low)), dtype)
        return np.clip(np.round(w / s), low, high).astype(int).tolist(), s, F(0)
    if fmt.zero is ZeroPoint.INT:
        bottom, top = min(w.min(), F(0)), max(w.max(), F(0))
        s = scale_of((top - bottom) / F(high - low), dtype)
        z = F(np.clip(np.round(F(low) - bottom / s), low, high))
        return np.clip(np.round(w / s) + z, low, high).astype(int).tolist(), s, z
    s = scale_of((w.max() - w.min()) / F(high - low), dtype)
    z = stored(w.min() if w.max() == w.min() else w.min() - F(low) * s, dtype)
    return np.clip(np.round((w - z) / s), low, high).astype(int).tolist(), s, z


@pytest.mark.parametrize("fmt", ["int8", "int4-g32-asym", "nf4-g32"])
def test_weights_too_small_for_scales_in_float16_are_warned_of(fmt):
    weight = torch.empty(16, 64).uniform_(-1e-5, 1e-5).half()
    with pytest.warns(QcoreWarning, match=r"up.weight: 100% of its groups are too small.*\n.*scale_dtype"):
        quantize(weight, fmt, name="up.weight")
    assert quantize(weight, fmt, scale_dtype=torch.float16).scale.dtype == torch.float16  # asked for
    wide = quantize(weight, fmt, scale_dtype=torch.float32)
    assert float((wide.dequantize() - weight).norm() / weight.float().norm()) < 0.15


@pytest.mark.parametrize("fmt", ["int8", "int8-g32", "int8-g32-asym"])
def test_scales_just_below_the_least_cost_little(fmt):
    weight = torch.empty(8, 20000).uniform_(-0.007, 0.007).half()  # as torch.nn.Linear(20000, 8) starts
    found = quantize(weight, fmt)
    assert float((found.dequantize(torch.float32) - weight).norm() / weight.float().norm()) < 0.008


def test_a_few_dead_rows_are_not_warned_of():
    weight = torch.randn(400, 64).half()
    weight[3:5] *= 1e-5
    weight[7] = 0
    assert quantize(weight, "int8").scale.dtype == torch.float16


def check(weight: torch.Tensor, fmt: Format, quantizer: str, dtype: torch.dtype) -> None:
    found = quantize(weight, fmt, quantizer, scale_dtype=dtype)
    assert (found.quantizer, found.scale.dtype, found.format) == (quantizer, dtype, fmt)
    codes, (n, k), g = found.codes().tolist(), weight.shape, fmt.group_size or weight.shape[1]
    zero = found.integer_zero() if fmt.zero is ZeroPoint.INT else found.zero
    rows = weight.float().numpy()
    for i in range(n):
        for group, start in enumerate(range(0, k, g)):
            q, s, z = expected_group(rows[i, start : start + g], fmt, quantizer, dtype)
            assert found.scale[group, i].item() == s
            assert (0 if zero is None else zero[group, i].item()) == z
            assert codes[i][start : start + g] == q


RULES = [
    ("int4-g8", "absmax"),
    ("int8", "absmax"),
    ("int4-g8", "absmax_full"),
    ("int8-g5", "absmax_full"),
    ("int4-g8-asym", "minmax"),
    ("int8-asym", "minmax"),
    ("int4-g8-fzp", "minmax"),
    ("int8-g5-fzp", "minmax"),
]


TABLES = ("fp8", "fp8_e5m2", "fp8-g32-e8m0", "fp4-g32-e8m0", "fp4-g16-e4m3", "fp4-g16-e4m3d", "nf4-g64", "fp4_bnb-g64")
"""Formats of elements that are tables, with every type of scale."""


class TestFormulas:
    @pytest.mark.parametrize(("text", "quantizer"), RULES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_against_numpy(self, text, quantizer, dtype):
        rng = torch.Generator().manual_seed(1)
        weight = torch.randn(5, 21, generator=rng) * 0.3 + torch.randn(5, 1, generator=rng)
        weight[1] = 0
        weight[2] = weight[2].abs()
        weight[3] = -weight[3].abs()
        weight[4] = 0.7
        check(weight, Format.parse(text), quantizer, dtype)

    @given(
        st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=24),
        st.sampled_from(RULES),
        st.sampled_from(DTYPES),
    )
    @settings(max_examples=150, deadline=None)
    def test_against_numpy_for_any_row(self, row, rule, dtype):
        check(torch.tensor([row], dtype=torch.float32), Format.parse(rule[0]), rule[1], dtype)

    def test_ties_go_to_even(self):
        # The scale is exactly 1, so that the weights are the exact values of the codes.
        weight = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5]])
        assert quantize(weight, "int4", "absmax").codes().tolist() == [[7, 0, 2, 2, 0, -2, -2, 6]]

    def test_absmax_never_uses_the_lowest_code(self):
        weight = torch.tensor([[-1.0, 0.4]])
        found = quantize(weight, "int4", "absmax")
        assert found.scale.item() == F(1) / F(7)
        assert found.codes().tolist() == [[-7, 3]]
        assert quantize(weight, "int8", "absmax").codes()[0, 0] == -127

    def test_absmax_stays_above_the_lowest_code_if_scales_round_down(self):
        weight = torch.linspace(-3, 3, 997).unsqueeze(1)
        for text, lowest in (("int8", -127), ("int4", -7)):
            found = quantize(weight, text, "absmax", scale_dtype=torch.bfloat16)
            assert found.codes().min() == lowest

    def test_absmax_full_uses_it(self):
        found = quantize(torch.tensor([[-1.0, 0.4]]), "int4", "absmax_full")
        assert found.scale.item() == 1 / 8
        assert found.codes().tolist() == [[-8, 3]]

    def test_the_scale_is_rounded_before_the_codes(self):
        weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        coarse = quantize(weight, "int8", "absmax", scale_dtype=torch.bfloat16)
        assert torch.equal(
            coarse.codes(), torch.round(weight / coarse.scale.float().t()).clamp(-127, 127).to(torch.int8)
        )
        fine = quantize(weight, "int8", "absmax")
        assert not torch.equal(coarse.codes(), fine.codes())

    def test_scale_dtype_is_the_weights_by_default(self):
        for dtype in DTYPES:
            assert quantize(torch.randn(2, 4).to(dtype), "int8").scale.dtype == dtype
        assert quantize(torch.randn(2, 4, dtype=torch.float64), "int8").scale.dtype == torch.float32


class TestMse:
    @staticmethod
    def errors(weight, qt):
        g = qt.format.group_size or weight.shape[1]
        squares = (qt.dequantize(torch.float64) - weight.double()) ** 2
        return torch.stack([part.sum(1) for part in squares.split(g, dim=1)])

    @pytest.mark.parametrize("zero", ["", "-asym", "-fzp"])
    @pytest.mark.parametrize("base", ["int4", "int4-g32", "int8-g32"])
    def test_no_group_is_worse_than_the_full_range(self, base, zero):
        weight = torch.randn(16, 77, generator=torch.Generator().manual_seed(3)) ** 3 + 0.1
        found = self.errors(weight, quantize(weight, base + zero, "mse"))
        full = self.errors(weight, quantize(weight, base + zero, "minmax" if zero else "absmax_full"))
        assert bool((found <= full * (1 + 1e-5) + 1e-12).all())
        if "int4" in base:
            assert found.sum() < 0.99 * full.sum()

    def test_best_of_all_clips_by_brute_force(self):
        weight = torch.randn(4, 13, generator=torch.Generator().manual_seed(5)) ** 3
        found = self.errors(weight, quantize(weight, "int4-g8", "mse"))
        best = torch.full_like(found, float("inf"))
        for step in range(15):
            # Clipping the largest values by hand: the scale of the clipped range, the codes of the weight itself.
            for row in range(4):
                for group, w in enumerate(weight[row].split(8)):
                    s = (1 - 0.03 * step) * max(w.max().item() / 7, w.min().item() / -8)
                    error = ((torch.round(w / s).clamp(-8, 7) * s - w).double() ** 2).sum()
                    best[group, row] = min(best[group, row], error)
        assert torch.allclose(found, best, rtol=1e-4)

    def test_a_ragged_group_is_quantized_by_itself(self):
        weight = torch.randn(32, 35, generator=torch.Generator().manual_seed(4)) ** 3
        weight[:, -1] = weight[:, 32:].abs().amax(1) * 0.93
        whole = quantize(weight, "int4-g32", "mse")
        tail = quantize(weight[:, 32:], "int4", "mse")
        assert torch.equal(whole.scale[1], tail.scale[0])
        assert torch.equal(whole.codes()[:, 32:], tail.codes())


class TestEdges:
    @pytest.mark.parametrize("quantizer", QUANTIZERS)
    @pytest.mark.parametrize("text", ["int4-g32", "int4-g32-asym", "int8-g32-fzp", "int8"])
    def test_an_all_zero_group_is_exactly_zero(self, text, quantizer):
        fmt = Format.parse(text)
        try:
            checked_quantizer(quantizer, fmt)
        except FormatError:
            return
        weight = torch.randn(3, 80)
        weight[:, 32:] = 0
        weight[1] = 0
        moments = torch.cov(torch.randn(80, 200)) if quantizer in NEEDS_MOMENTS else None
        dense = quantize(weight, fmt, quantizer, moments=moments).dequantize()
        assert dense[1].tolist() == [0.0] * 80
        if fmt.group_size:
            assert dense[:, 32:].abs().max() == 0

    @pytest.mark.parametrize("text", ["int4-g32-fzp", "int8-fzp"])
    def test_a_constant_group_is_exact_with_a_float_zero(self, text):
        assert quantize(torch.full((2, 64), 0.3), text).dequantize().unique().tolist() == [F(0.3)]

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("text", ["int8", "int4-g32", "int4-g32-asym", "int4-g32-fzp", *TABLES])
    @pytest.mark.parametrize("quantizer", ["mse", None])
    def test_nan_and_inf_name_the_tensor(self, text, bad, quantizer):
        weight = torch.randn(3, 77)
        weight[2, 76] = bad
        with pytest.raises(FormatError, match=r"layers\.0\.weight holds NaN or Inf"):
            quantize(weight, text, quantizer, name="layers.0.weight")

    @pytest.mark.parametrize(("text", "quantizer"), RULES)
    def test_fp16_scales_do_not_underflow(self, text, quantizer):
        weight = torch.tensor([[1e-7, -2e-7, 3e-8, 0.0] * 4])
        found = quantize(weight, text, quantizer, scale_dtype=torch.float16)
        assert found.scale.min() == torch.finfo(torch.float16).smallest_normal
        assert (found.dequantize(torch.float32) - weight).abs().max() < torch.finfo(torch.float16).smallest_normal

    def test_denormal_weights(self):
        assert quantize(torch.full((1, 4), 1e-44), "int8").dequantize().abs().max() < 1e-37

    def test_too_large_for_the_scale(self):
        with pytest.raises(FormatError, match=r"w is too large for scales in torch.float16.\nPass scale_dtype"):
            quantize(torch.full((1, 4), 1e9), "int8", scale_dtype=torch.float16, name="w")
        for weight in (torch.tensor([[3e38, -3e38]]), torch.full((1, 4), 1e300, dtype=torch.float64)):
            with pytest.raises(FormatError, match="Rescale the weight"):
                quantize(weight, "int8-asym")
        for text in TABLES:
            with pytest.raises(FormatError, match="too large for scales"):
                quantize(torch.full((1, 64), 1e300, dtype=torch.float64), text)

    @pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (1, 1)])
    @pytest.mark.parametrize("text", ["int8", "int4-g32", "int4-g32-asym/plain_int32", "int8-fzp"])
    def test_empty_and_tiny(self, text, shape):
        found = quantize(torch.ones(shape), text)
        assert found.shape == shape
        assert found.dequantize().shape == shape
        assert found.scale.shape == (found.format.groups(shape[1]), shape[0])

    @pytest.mark.parametrize("k", [1, 5, 31, 33, 77])
    def test_ragged_and_odd_k(self, k):
        weight = torch.randn(4, k)
        found = quantize(weight, "int4-g32-asym")
        assert found.scale.shape == (-(-k // 32), 4)
        steps = found.scale.repeat_interleave(32, 0)[:k].t()
        assert bool(((found.dequantize() - weight).abs() <= steps * 3).all())

    def test_rows_do_not_depend_on_how_many_are_quantized_at_a_time(self, monkeypatch):
        weight = torch.randn(37, 65)
        whole = quantize(weight, "int4-g32-asym")
        monkeypatch.setattr(sys.modules[quantize.__module__], "_CHUNK_ELEMENTS", 200)
        chunked = quantize(weight, "int4-g32-asym")
        assert all(torch.equal(a, b) for a, b in zip(whole.tensors().values(), chunked.tensors().values(), strict=True))

    def test_strides_gradients_and_narrow_floats(self):
        weight = torch.randn(8, 6).t().requires_grad_()
        found = quantize(weight, "int4-g3")
        assert not found.scale.requires_grad
        assert torch.equal(found.codes(), quantize(weight.detach().clone(), "int4-g3").codes())
        assert quantize(torch.randn(2, 4).to(torch.float8_e4m3fn), "int8").scale.dtype == torch.float32

    @pytest.mark.parametrize("text", ["int8", "int4-g32-asym/plain_int32", "int8-g32-fzp"])
    def test_meta_and_fake(self, text):
        real = quantize(torch.randn(3, 77), text)
        shapes = [(t.shape, t.dtype) for t in real.tensors().values()]
        meta = quantize(torch.empty(3, 77, device="meta"), text)
        assert [(t.shape, t.dtype) for t in meta.tensors().values()] == shapes
        with FakeTensorMode():
            fake = quantize(torch.empty(3, 77), text)
        assert [(t.shape, t.dtype) for t in fake.tensors().values()] == shapes


class TestChoice:
    @pytest.mark.parametrize(
        ("text", "name"),
        [
            ("int4", "mse"),
            ("int4-g32-asym", "mse"),
            ("int8", "absmax"),
            ("int8-asym", "minmax"),
            ("int8-fzp", "minmax"),
        ],
    )
    def test_defaults(self, text, name):
        assert default_quantizer(Format.parse(text)) == name
        assert quantize(torch.randn(2, 8), text).quantizer == name

    def test_unknown_lists_the_known(self):
        with pytest.raises(FormatError, match=r"known: absmax,.* mse, als, awq, gptq\. Did you mean 'absmax'"):
            quantize(torch.ones(2, 2), "int8", "absmx")

    @pytest.mark.parametrize(
        ("text", "quantizer", "fitting"),
        [
            ("int4", "minmax", "absmax, absmax_full, mse, als, awq, gptq"),
            ("int4-asym", "absmax", "minmax, mse, als, awq, gptq"),
        ],
    )
    def test_that_does_not_fit_lists_the_fitting(self, text, quantizer, fitting):
        with pytest.raises(FormatError, match=f"use one of: {fitting}"):
            quantize(torch.ones(2, 2), text, quantizer)

    @pytest.mark.parametrize("weight", [torch.ones(3), torch.ones(2, 2, 2), torch.ones(2, 2, dtype=torch.int8)])
    def test_wrong_weight(self, weight):
        with pytest.raises(FormatError, match=r"cannot quantize head: dtype .*\n.*\(N, K\)"):
            quantize(weight, "int8", name="head")

    def test_wrong_scale_dtype(self):
        with pytest.raises(FormatError, match="float32, bfloat16 or float16"):
            quantize(torch.ones(2, 2), "int8", scale_dtype=torch.float64)
