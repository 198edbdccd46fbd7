"""The quantizers that search: each is at least as good as the one it refines, by the error that it minimises."""

from __future__ import annotations

import pytest
import torch

import qcore
from qcore.errors import FormatError
from qcore.formats import Format
from qcore.weights.importance import importance_of
from qcore.weights.quantizers import quantize

TEXTS = [
    "int4", "int4-g32", "int4-g32-asym", "int4-g48-fzp", "int8-g32", "int8-asym", "fp4-g32", "fp4-g32-e8m0",
    "fp4-g16-e4m3", "nf4-g64", "fp8-g128",
]  # fmt: skip


def normal(n: int = 24, k: int = 208) -> torch.Tensor:
    return torch.randn(n, k)


def skewed(n: int = 24, k: int = 208) -> torch.Tensor:
    return torch.randn(n, k).exp() - 0.7


def inputs(k: int) -> torch.Tensor:
    return torch.randn(4 * k, k) @ (torch.randn(k, k) * torch.logspace(0, -1.5, k).unsqueeze(1))


def errors(weight: torch.Tensor, found: qcore.QTensor) -> torch.Tensor:
    """The error of each group as ``als`` weighs it, ``(N, G)``."""
    off, group = (found.dequantize(torch.float64) - weight.double()) ** 2, found.format.group(weight.shape[1])
    parts = zip(off.split(group, dim=1), (weight.double() ** 2).split(group, dim=1), strict=True)
    return torch.stack([(e * (2 * w.mean(1, keepdim=True) + w).sqrt()).sum(1) for e, w in parts], dim=1)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [normal, skewed])
class TestAgainstSimpler:
    def test_als_is_never_worse_than_the_whole_range(self, text, make):
        weight, affine = make(), Format.parse(text).zero is not qcore.ZeroPoint.NONE
        best, plain = quantize(weight, text, "als"), quantize(weight, text, "minmax" if affine else "absmax_full")
        assert bool((errors(weight, best) <= errors(weight, plain) * (1 + 1e-4) + 1e-12).all())

    def test_als_is_below_mse_over_all_groups(self, text, make):
        weight = make()
        best, plain = quantize(weight, text, "als"), quantize(weight, text, "mse")
        assert errors(weight, best).sum() <= errors(weight, plain).sum() * (1 + 1e-4)

    def test_awq_is_below_mse_in_the_output_and_gptq_below_awq(self, text, make):
        weight = make()
        x = inputs(weight.shape[1])
        moments = x.t() @ x
        found = {q: quantize(weight, text, q, moments=None if q == "mse" else moments) for q in ("mse", "awq", "gptq")}
        g = found["mse"].format.group(weight.shape[1])
        off = {q: one.dequantize() - weight for q, one in found.items()}
        # awq knows the inputs of one group at a time; gptq those of all.
        mse, awq = (sum(block_error(off[q], x, at, g) for at in range(0, len(moments), g)) for q in ("mse", "awq"))
        assert awq <= mse * (1 + 1e-4)
        assert block_error(off["gptq"], x) < 0.8 * block_error(off["awq"], x)


def block_error(off: torch.Tensor, x: torch.Tensor, at: int = 0, size: int | None = None) -> float:
    columns = slice(at, None if size is None else at + size)
    return float((off[:, columns] @ x[:, columns].t()).square().sum())


class TestSign:
    def test_a_negative_scale_reaches_the_larger_end(self):
        weight = torch.tensor([[8.0, -7.0, 1.0, 3.0, -2.0, 5.0]])
        found = quantize(weight, "int4", "als")
        assert found.scale.item() == -1
        assert torch.equal(found.dequantize(), weight)

    @pytest.mark.parametrize("text", ["int4-g32-asym", "int4-g32-fzp", "fp4-g32-e8m0", "fp4-g16-e4m3"])
    def test_others_stay_positive(self, text):
        assert float(quantize(skewed(), text, "als").scales().min()) > 0

    def test_a_layer_runs_with_it(self):
        layer, x = torch.nn.Linear(64, 8), torch.randn(5, 64)
        made = qcore.nn.QuantizedLinear.from_float(layer, "w4a16-g32@als")
        assert made.weight.scale.min() < 0
        expected = torch.nn.functional.linear(x, made.weight.dequantize(), layer.bias)
        torch.testing.assert_close(made(x), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("quantizer", ["als", "awq", "gptq"])
class TestEdges:
    @staticmethod
    def made(weight: torch.Tensor, text: str, quantizer: str) -> qcore.QTensor:
        moments = None if quantizer == "als" else torch.eye(weight.shape[1])
        return quantize(weight, text, quantizer, moments=moments)

    @pytest.mark.parametrize("text", TEXTS)
    def test_a_group_of_zeros_is_exactly_zero(self, text, quantizer):
        weight = normal()
        weight[3] = 0
        assert self.made(weight, text, quantizer).dequantize()[3].abs().max() == 0

    @pytest.mark.parametrize("text", ["int4-g32-fzp", "int8-fzp"])
    def test_a_constant_group_is_exact_with_a_float_zero(self, text, quantizer):
        weight = torch.full((2, 64), 0.3)
        assert torch.equal(self.made(weight, text, quantizer).dequantize(), weight)

    @pytest.mark.parametrize("text", ["int4-g32", "int4-g32-asym", "int4-g32-fzp", "nf4-g64", "fp4-g16-e4m3"])
    @pytest.mark.parametrize("shape", [(3, 0), (0, 5), (4, 1), (4, 77), (1, 33)])
    def test_shapes(self, text, shape, quantizer):
        weight = torch.randn(shape)
        found = self.made(weight, text, quantizer)
        assert tuple(found.shape) == shape
        assert (found.dequantize() - weight).abs().sum() <= 0.3 * weight.abs().sum()
        meta = quantize(torch.empty(shape, device="meta"), text, quantizer, moments=self.moments(shape[1], quantizer))
        assert [t.shape for t in meta.tensors().values()] == [t.shape for t in found.tensors().values()]

    @staticmethod
    def moments(k: int, quantizer: str) -> torch.Tensor | None:
        return None if quantizer == "als" else torch.eye(k, device="meta")

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.parametrize("text", ["int4-g32", "int4-g32-asym", "int4-g32-fzp", "nf4-g64"])
    def test_nan_and_inf_are_refused(self, text, bad, quantizer):
        weight = normal()
        weight[2, 7] = bad
        with pytest.raises(FormatError, match="holds NaN or Inf"):
            self.made(weight, text, quantizer)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_scales_are_fitted_as_they_are_stored(self, dtype, quantizer):
        weight = normal().to(dtype)
        found, plain = self.made(weight, "int4-g32-fzp", quantizer), quantize(weight, "int4-g32-fzp", "minmax")
        assert found.scale.dtype == dtype
        assert errors(weight, found).sum() < errors(weight, plain).sum()


class TestImportance:
    def test_is_relative_and_positive(self):
        found = importance_of(torch.diag(torch.tensor([0.0, 1.0, 3.0, 4.0])))
        torch.testing.assert_close(found, torch.tensor([0.01, 0.51, 1.51, 2.01]))

    def test_without_inputs_all_weigh_the_same(self):
        assert importance_of(torch.zeros(3, 3)).unique().numel() == 1

    def test_bad_moments_are_refused(self):
        with pytest.raises(FormatError, match=r"not a sum of x x\^T"):
            quantize(normal(2, 4), "int4", "awq", moments=torch.full((4, 4), float("nan")))

    def test_a_model_is_calibrated_for_awq(self):
        model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 8))
        qcore.quantize_(model, "w4a16-g16@awq", calibration=[torch.randn(40, 32)])
        assert {layer.weight.quantizer for layer in model} == {"awq"}
