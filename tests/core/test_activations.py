"""Activation and output quantization against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import qcore
from qcore.errors import FormatError
from qcore.weights.activations import (
    DynamicInt8,
    OutputInt8,
    StaticInt8,
    dynamic_parameters,
    given_numbers,
    quantize_int8,
    static_from_range,
)

F = np.float32


def rows() -> torch.Tensor:
    x = torch.randn(7, 19, generator=torch.Generator().manual_seed(0)) + 0.2
    x[1] = 0
    x[2] = x[2].abs()
    x[3] = -x[3].abs()
    x[4] *= 1e-30
    x[5] *= 1e30
    return x


class TestDynamic:
    def test_symmetric(self):
        scale, zero = dynamic_parameters(rows())
        assert zero is None
        assert (scale.dtype, scale.shape) == (torch.float32, (7, 1))
        for i, row in enumerate(rows().numpy()):
            top = F(np.abs(row).max())
            assert scale[i].item() == (F(1) if top == 0 else top / F(127))

    def test_asymmetric(self):
        scale, zero = dynamic_parameters(rows(), symmetric=False)
        for i, row in enumerate(rows().numpy()):
            low, high = min(row.min(), F(0)), max(row.max(), F(0))
            s = F(1) if high == low else (high - low) / F(255)
            assert scale[i].item() == s
            assert zero[i].item() == np.round(F(-128) - low / s)
            assert -128 <= zero[i].item() <= 127

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_a_row_of_zeros_gives_scale_1_and_zeros_back(self, symmetric):
        x = torch.zeros(2, 8)
        scale, zero = dynamic_parameters(x, symmetric)
        assert scale.unique().tolist() == [1.0]
        q = quantize_int8(x, scale, zero)
        assert torch.equal((q - (0 if zero is None else zero)) * scale, x)

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_zero_is_exact_and_errors_are_at_most_half_a_step(self, symmetric):
        x = torch.cat([rows()[:4], torch.zeros(4, 1)], dim=1)
        scale, zero = dynamic_parameters(x, symmetric)
        back = (quantize_int8(x, scale, zero).float() - (0 if zero is None else zero)) * scale
        assert back[:, -1].abs().max() == 0
        slack = 1.0 if zero is not None else 0.5  # a rounded zero point may clip the outermost code by half a step
        assert bool(((back - x).abs() <= scale * (slack + 1e-3)).all())

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_smallest_numbers_give_a_normal_scale(self, symmetric):
        scale, _ = dynamic_parameters(torch.tensor([[1e-40, -1e-40]]), symmetric)
        assert scale.item() == torch.finfo(torch.float32).smallest_normal

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_nan_stays_in_its_token(self, symmetric):
        scale, _ = dynamic_parameters(torch.tensor([[1.0, float("nan")], [1.0, 2.0]]), symmetric)
        assert scale.isnan().flatten().tolist() == [True, False]

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_shapes(self, symmetric):
        for shape in ((2, 3, 5), (5,), (0, 5), (3, 0)):
            scale, _ = dynamic_parameters(torch.ones(shape), symmetric)
            assert scale.shape == (*shape[:-1], 1)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_x_is_computed_in_float32(self, dtype):
        x = rows()[:4].to(dtype)
        for symmetric in (True, False):
            narrow, wide = dynamic_parameters(x, symmetric), dynamic_parameters(x.float(), symmetric)
            assert torch.equal(narrow[0], wide[0])
            assert symmetric or torch.equal(narrow[1], wide[1])


class TestQuantizeInt8:
    def test_ties_and_clamping(self):
        x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 127.4, 200.0, -128.4, -500.0])
        assert quantize_int8(x, 1.0, None).tolist() == [0, 2, 2, 0, -2, 127, 127, -128, -128]

    def test_rounds_before_the_zero_point_is_added(self):
        assert quantize_int8(torch.tensor([0.5, 1.5, -300.0]), 1.0, 5).tolist() == [5, 7, -128]
        assert quantize_int8(torch.tensor([1.0]), 1.0, 127.0).tolist() == [127]

    def test_parameters_broadcast(self):
        q = quantize_int8(torch.ones(2, 3), torch.tensor([[1.0], [0.5]]), torch.tensor([[0], [-3]]))
        assert q.dtype == torch.int8
        assert q.tolist() == [[1] * 3, [-1] * 3]


class TestGiven:
    @pytest.mark.parametrize("kind", [StaticInt8, OutputInt8])
    def test_blank_and_given(self, kind):
        assert not kind().is_given
        assert kind(0.1, 3).is_given
        assert kind(per_token=True).is_given
        assert kind(0.1, 3).blank() == kind()
        assert kind(per_token=True).blank() == kind(per_token=True)

    @pytest.mark.parametrize("kind", [StaticInt8, OutputInt8])
    @pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-60, 1e60])
    def test_scale(self, kind, scale):
        with pytest.raises(FormatError, match=f"{kind.__name__}: scale is"):
            kind(scale)

    @pytest.mark.parametrize("zero_point", [-129, 128, 3.5])
    def test_zero_point(self, zero_point):
        with pytest.raises(FormatError, match=r"integer in -128..127"):
            StaticInt8(0.1, zero_point)

    def test_a_zero_point_needs_a_scale(self):
        with pytest.raises(FormatError, match="needs a scale"):
            StaticInt8(None, 3)

    def test_per_token_numbers_come_with_each_call(self):
        with pytest.raises(FormatError, match="omit scale"):
            OutputInt8(0.1, per_token=True)

    def test_numbers_become_plain(self):
        given = StaticInt8(torch.tensor(0.25), torch.tensor(3))
        assert given == StaticInt8(0.25, 3)
        assert hash(given) == hash(StaticInt8(0.25, 3))
        assert (type(given.scale), type(given.zero_point)) == (float, int)
        assert type(StaticInt8(np.float32(0.1)).scale) is float

    def test_activation_and_output_are_different_things(self):
        assert StaticInt8(0.1) != OutputInt8(0.1)
        assert DynamicInt8() == DynamicInt8(symmetric=True)


class TestGivenNumbers:
    @pytest.mark.parametrize("kind", [StaticInt8, OutputInt8])
    def test_for_a_whole_tensor(self, kind):
        assert given_numbers(kind(0.25, -3)) == (0.25, -3)
        assert given_numbers(kind(0.25)) == (0.25, 0)

    @pytest.mark.parametrize("part", [None, DynamicInt8(), DynamicInt8(symmetric=False)])
    def test_nothing_is_given(self, part):
        assert given_numbers(part) == (None, 0)

    @pytest.mark.parametrize("kind", [StaticInt8, OutputInt8])
    def test_per_token_there_is_no_such_number(self, kind):
        assert given_numbers(kind(per_token=True)) == (None, 0)

    @pytest.mark.parametrize("kind", [StaticInt8, OutputInt8])
    def test_numbers_that_are_left_open(self, kind):
        assert given_numbers(kind()) == (1.0, 0)


class TestStaticFromRange:
    @pytest.mark.parametrize(
        ("low", "high", "scale", "zero"),
        [
            (-1.0, 1.55, 0.01, -28),
            (0.0, 2.55, 0.01, -128),
            (-2.55, 0.0, 0.01, 127),
            (1.0, 2.55, 0.01, -128),
            (0, 0, 1.0, -128),
        ],
    )
    def test_examples(self, low, high, scale, zero):
        found = static_from_range(low, high)
        assert found[0] == pytest.approx(scale)
        assert found[1] == zero
        StaticInt8(*found)

    def test_tiny_range_is_a_legal_scale(self):
        StaticInt8(*static_from_range(-1e-44, 1e-44))

    @pytest.mark.parametrize(
        ("low", "high"), [(float("nan"), 1.0), (0.0, float("nan")), (0.0, float("inf")), (-3e38, 3e38)]
    )
    def test_not_finite(self, low, high):
        with pytest.raises(FormatError, match="not finite"):
            static_from_range(low, high)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8", "w4a8-g32", "w8a8-aasym", "w4a8-g32-asym-aasym"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_an_infinity_gives_nan_in_its_token_only(scheme, dtype, rows):
    """The contract leaves it open; an infinity of the wrong sign, as it was, hides where the overflow came from."""
    layer = qcore.nn.QuantizedLinear.from_float(nn.Linear(64, 8).to(dtype), scheme)
    x = torch.ones(rows, 64, dtype=dtype)
    x[0, 0] = torch.inf
    y = layer(x)
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()
