"""GPTQ against a plain loop in float64, and through a whole model."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import qcore
from qcore.checkpoint import quantize_checkpoint
from qcore.errors import FormatError
from qcore.formats import Format, ZeroPoint
from qcore.weights.gptq import inverse_factor
from qcore.weights.least_squares import alternating
from qcore.weights.quantizers import quantize
from qcore.weights.targets import Target

TEXTS = [
    "int4", "int4-asym", "int4-fzp", "int4-g32", "int4-g32-asym", "int4-g7-fzp", "int4-g200", "int4-g48/plain_int32",
    "int8", "int8-asym", "int8-g64", "int8-g50-asym", "int8-g128-fzp",
]  # fmt: skip


def inputs(k: int, rows: int | None = None, seed: int = 0) -> torch.Tensor:
    """Correlated inputs: a few directions carry most of them, as in real models."""
    rng = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=rng) * torch.logspace(0, -1.5, k).unsqueeze(1) / k**0.5
    return torch.randn(rows or 2 * k, k, generator=rng) @ mix


def weights(n: int, k: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05 + 0.01


def loop(weight: torch.Tensor, found: qcore.QTensor, moments: torch.Tensor) -> torch.Tensor:
    """Algorithm 1 of the paper without blocks, the inverse inverted as it is written, columns by falling moment."""
    fmt = found.format
    rest, h, (low, high) = weight.double().clone(), moments.double(), fmt.code_range
    h = h + 0.01 * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    order = moments.diagonal().argsort(descending=True, stable=True).tolist()
    upper = torch.linalg.cholesky(torch.linalg.inv(h[order][:, order]), upper=True)
    codes, g = torch.empty_like(weight, dtype=torch.int8), fmt.group(weight.shape[1])
    for i, k in enumerate(order):
        s, z = found.scale[k // g].double(), 0 if found.zero is None else found.zero[k // g].double()
        if fmt.zero is ZeroPoint.FLOAT:
            q = ((rest[:, k] - z) / s).round().clamp(low, high)
            value = q * s + z
        else:
            q = ((rest[:, k] / s).round() + z).clamp(low, high)
            value = (q - z) * s
        codes[:, k] = q
        error = (rest[:, k] - value) / upper[i, i]
        rest[:, order[i:]] -= error.unsqueeze(1) * upper[i, i:]
    return codes


def output_error(weight: torch.Tensor, found: qcore.QTensor, x: torch.Tensor) -> float:
    return float(((weight - found.dequantize(torch.float32)) @ x.t()).square().sum())


class TestAlgorithm:
    @pytest.mark.parametrize("text", TEXTS)
    def test_equals_the_plain_loop(self, text):
        fmt, x, weight = Format.parse(text), inputs(301), weights(9, 301)
        found = quantize(weight, fmt, "gptq", moments=x.t() @ x)
        codes = loop(weight, found, x.t() @ x)
        # float32 and float64 may round a value in the middle between two codes to either side, and what follows it.
        assert (found.codes() != codes).float().mean() < 0.002
        assert (found.quantizer, found.format) == ("gptq", fmt)

    @pytest.mark.parametrize("text", TEXTS)
    @pytest.mark.parametrize("k", [256, 301])
    def test_the_error_of_the_output_is_far_below_that_of_mse(self, text, k):
        x, weight = inputs(k), weights(24, k)
        plain, better = quantize(weight, text, "mse"), quantize(weight, text, "gptq", moments=x.t() @ x)
        assert output_error(weight, better, x) < 0.6 * output_error(weight, plain, x)
        assert (weight - better.dequantize()).norm() > (weight - plain.dequantize()).norm(), "the weight's own error"

    @pytest.mark.parametrize("text", TEXTS)
    def test_inputs_that_do_not_correlate_leave_least_squares(self, text):
        weight = weights(8, 77)
        fmt, same = Format.parse(text), quantize(weight, text, "gptq", moments=torch.eye(77) * 3)
        target, g = Target(fmt, torch.float32), fmt.group(77)
        for at in range(0, 77, g):
            group = weight[:, at : at + g].unsqueeze(1)
            expected = alternating(group, target)
            codes = target.codes(group, expected).squeeze(1).to(torch.int8)
            assert torch.equal(same.codes()[:, at : at + g], codes)
            # Summed with equal weights, and without.
            torch.testing.assert_close(same.scale[at // g], expected.scale.flatten(), rtol=1e-5, atol=0)

    def test_an_always_zero_input_is_rounded_to_nearest(self):
        x, weight = inputs(64), weights(8, 64)
        x[:, 16:32] = 0
        moments, dead = x.t() @ x, slice(16, 32)
        found = quantize(weight, "int4-g16", "gptq", moments=moments).codes()
        assert torch.equal(found[:, dead], quantize(weight[:, dead], "int4", "gptq", moments=torch.eye(16)).codes())
        weight[:, dead] = weights(8, 16, seed=7)
        other = quantize(weight, "int4-g16", "gptq", moments=moments).codes()
        assert torch.equal(other[:, :16], found[:, :16])
        assert torch.equal(other[:, 32:], found[:, 32:])

    def test_without_any_input_weights_of_inputs_do_not_matter(self):
        found, plain = (
            quantize(weights(8, 64), "int4", "gptq", moments=h) for h in (torch.zeros(64, 64), torch.eye(64))
        )
        assert torch.equal(found.codes(), plain.codes())

    def test_errors_pass_over_a_group_of_zeros(self):
        x, weight = inputs(96), weights(8, 96)
        weight[:, 32:64] = 0
        for text in ("int4-g32", "int4-g32-asym", "int4-g32-fzp"):
            found = quantize(weight, text, "gptq", moments=x.t() @ x)
            assert found.dequantize()[:, 32:64].abs().max() == 0
            assert output_error(weight, found, x) < 0.8 * output_error(weight, quantize(weight, text, "mse"), x)

    def test_is_the_same_every_time_and_by_rows(self, monkeypatch):
        x, weight = inputs(200), weights(30, 200)
        moments = x.t() @ x
        first = quantize(weight, "int4-g32-asym", "gptq", moments=moments)
        again = quantize(weight, "int4-g32-asym", "gptq", moments=moments.double())
        monkeypatch.setattr(sys.modules["qcore.weights.quantizers"], "_LARGE_CHUNK_ELEMENTS", 200 * 7)
        parts = quantize(weight, "int4-g32-asym", "gptq", moments=moments)
        assert torch.equal(first.data, again.data)
        assert (first.codes() != parts.codes()).float().mean() < 0.002

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_weights_of_every_dtype(self, dtype):
        x, weight = inputs(70), weights(4, 70).to(dtype).requires_grad_()
        found = quantize(weight, "int4-g32", "gptq", moments=x.t() @ x)
        assert found.scale.dtype == (torch.float32 if dtype == torch.float64 else dtype)
        plain = quantize(weight, "int4-g32", "mse")
        assert output_error(weight.detach().float(), found, x) < 0.8 * output_error(weight.detach().float(), plain, x)

    @pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1)])
    def test_empty_and_tiny_weights(self, shape):
        found = quantize(torch.ones(shape), "int4-g2", "gptq", moments=torch.eye(shape[1]))
        assert (tuple(found.shape), found.quantizer) == (shape, "gptq")

    def test_without_values_the_outline_is_the_same(self):
        real = quantize(weights(3, 70), "int4-g32-asym", "gptq", moments=torch.eye(70))
        meta = quantize(torch.empty(3, 70, device="meta"), "int4-g32-asym", "gptq", moments=torch.eye(70))
        with FakeTensorMode():
            fake = quantize(torch.empty(3, 70), "int4-g32-asym", "gptq", moments=torch.empty(70, 70))
        for found in (meta, fake):
            assert found.quantizer == "gptq"
            assert [t.shape for t in found.tensors().values()] == [t.shape for t in real.tensors().values()]


class TestFactor:
    def test_is_the_cholesky_factor_of_the_inverse(self):
        x = inputs(50)
        h = (x.t() @ x).double()
        h += 0.01 * h.diagonal().mean() * torch.eye(50, dtype=torch.float64)
        factor = inverse_factor(x.t() @ x).double()
        assert torch.equal(factor, factor.triu())
        expected = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
        torch.testing.assert_close(factor, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))

    def test_damping_rises_until_a_factor_is_found(self):
        moments = torch.diag(torch.tensor([1.0] * 9 + [-0.02]))
        assert torch.isfinite(inverse_factor(moments)).all()

    @pytest.mark.parametrize("bad", [-torch.eye(3), torch.full((3, 3), float("nan")), torch.eye(3) / 0])
    def test_what_is_no_moment_is_an_error(self, bad):
        with pytest.raises(FormatError, match=r"moments for fc\.weight are not a sum of x x\^T"):
            inverse_factor(bad, "fc.weight")


class TestErrors:
    def test_missing_moments_say_where_they_come_from(self):
        with pytest.raises(FormatError, match=r"'gptq' for head needs.*\nUse qcore.quantize_\(.*calibration=batches"):
            quantize(weights(2, 8), "int4", "gptq", name="head")
        with pytest.raises(FormatError, match="calibration=batches"):
            qcore.nn.QuantizedLinear.from_float(nn.Linear(8, 2), "w4a16@gptq")
        with pytest.raises(FormatError, match="calibration=batches"):
            qcore.nn.QuantizedConv2d.from_float(nn.Conv2d(1, 1, 3), "w4a16@gptq")

    @pytest.mark.parametrize("moments", [torch.eye(7), torch.ones(8), torch.eye(8, dtype=torch.int64)])
    def test_moments_of_another_shape_or_dtype(self, moments):
        with pytest.raises(FormatError, match=r"sum of x x\^T over inputs x of this weight: floating-point, \(8, 8\)"):
            quantize(weights(2, 8), "int4", "gptq", moments=moments)

    def test_moments_that_nobody_reads(self):
        with pytest.raises(FormatError, match="'mse' for weight takes no moments"):
            quantize(weights(2, 8), "int4", moments=torch.eye(8))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_a_bad_weight_is_named(self, bad):
        weight = weights(2, 8)
        weight[1, 3] = bad
        with pytest.raises(FormatError, match="head holds NaN or Inf"):
            quantize(weight, "int4-g4", "gptq", moments=torch.eye(8), name="head")

    def test_moments_of_a_convolution_come_by_group(self):
        with pytest.raises(FormatError, match=r"a convolution's are \(groups, K, K\)"):
            qcore.nn.QuantizedConv2d.from_float(nn.Conv2d(2, 2, 3, groups=2), "w4a16@gptq", moments=torch.eye(9)[None])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 48)
        self.conv = nn.Conv2d(2, 6, 3, padding=1, groups=2)
        self.up = nn.Linear(48, 96)
        self.head = nn.Linear(96, 50)
        self.runs = 0

    def forward(self, tokens):
        self.runs += 1
        x = self.table(tokens)
        x = x + self.conv(torch.stack([x, -x], dim=1)).mean(1)
        return self.head(torch.relu(self.up(x)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def batches():
    return list(torch.randint(50, (6, 4, 9), generator=torch.Generator().manual_seed(3)))


class TestModel:
    def test_every_layer_is_closer_than_under_mse(self, net, batches):
        expected, found = net(batches[0]).detach(), {}
        for scheme in ("w4a16-g16", "w4a16-g16@gptq"):
            model = copy.deepcopy(net)
            qcore.quantize_(model, {"table": "w8a16", "*": scheme}, calibration=batches[1:])
            found[scheme] = (model(batches[0]) - expected).norm().item()
        assert found["w4a16-g16@gptq"] < 0.9 * found["w4a16-g16"]

    def test_the_batches_run_once_and_leave_the_model_as_it_was(self, net, batches):
        net.train()
        net.up.eval()
        report = qcore.quantize_(net, {"up": "w4a8-g16-static@gptq", "*": "w4a8-g16@gptq"}, calibration=iter(batches))
        assert net.runs == len(batches)
        assert (net.training, net.up.training, net.head.training) == (True, False, True)
        assert not net.up._forward_pre_hooks
        assert net.up.scheme.activation.is_given
        assert {row.name: row.scheme for row in report} == {
            "table": "w4a16-g16",
            "conv": "w4a8-g16@gptq",
            "up": "w4a8-g16-static@gptq",
            "head": "w4a8-g16@gptq",
        }

    def test_an_embedding_falls_back_to_mse_and_says_so(self, net, batches):
        report = qcore.quantize_(net, "w4a16-g16@gptq", calibration=batches)
        assert report["table"].reason.startswith("mse instead of gptq: no inputs")
        assert "instead" not in report["up"].reason
        assert (net.table.scheme.quantizer, net.table.weight.quantizer) == ("mse", "mse")
        assert (net.up.scheme.quantizer, net.up.weight.quantizer) == ("gptq", "gptq")
        alone = qcore.nn.QuantizedEmbedding.from_float(nn.Embedding(4, 8), "w4a16@gptq")
        assert alone.weight.quantizer == "mse"

    def test_what_raises_leaves_the_model_as_it_was(self, net, batches):
        kinds = {name: type(module) for name, module in net.named_modules()}
        with pytest.raises(FormatError, match="Pass calibration=batches"):
            qcore.quantize_(net, "w4a16-g16@gptq")
        with torch.no_grad():
            net.head.weight[0, 0] = float("nan")
        with pytest.raises(FormatError, match="head holds NaN"):
            qcore.quantize_(net, "w4a16-g16@gptq", calibration=batches)
        assert {name: type(module) for name, module in net.named_modules()} == kinds

    def test_a_tied_table_takes_the_codes_of_the_calibrated_layer(self, batches):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 48), nn.Linear(48, 50, bias=False))
        model[1].weight = model[0].weight
        table, x = model[0].weight.detach().clone(), model[0](torch.cat(batches).flatten()).detach()
        qcore.quantize_(model, "w4a16-g16@gptq", calibration=batches)
        assert model[0]._store is model[1]._store
        assert (model[0].scheme.quantizer, model[1].scheme.quantizer) == ("gptq", "gptq")
        expected = quantize(table, "int4-g16", "gptq", moments=x.t() @ x)
        assert (model[1].weight.codes() != expected.codes()).float().mean() < 0.01

    def test_tables_that_share_a_weight_share_mse(self):
        model = nn.ModuleList([nn.Embedding(5, 8), nn.Embedding(5, 8)])
        model[1].weight = model[0].weight
        report = qcore.quantize_(model, "w4a16@gptq")
        assert {module.scheme.quantizer for module in model} == {"mse"}
        assert all(row.reason.startswith("mse instead") for row in report)

    def test_a_checkpoint_says_gptq_and_loads_without_calibration(self, net, batches, tmp_path):
        qcore.quantize_(net, "w4a16-g16@gptq", calibration=batches)
        qcore.save(net, tmp_path / "net.safetensors")
        fresh = Net()
        qcore.load_(fresh, tmp_path / "net.safetensors")
        assert str(fresh.up.scheme) == "w4a16-g16@gptq"
        assert fresh.conv.weight.quantizer == "gptq"
        assert torch.equal(fresh(batches[0]), net(batches[0]))
        copied = copy.deepcopy(fresh)
        copied.load_state_dict(net.state_dict())
        assert torch.equal(copied(batches[0]), net(batches[0]))

    def test_a_checkpoint_alone_cannot_be_quantized_so(self, net, tmp_path):
        qcore.save(net, tmp_path / "net.safetensors")
        with pytest.raises(FormatError, match=r"'w4a16-g16@gptq' needs inputs from running.*\nUse qcore.quantize_"):
            quantize_checkpoint(tmp_path / "net.safetensors", tmp_path / "out.safetensors", "w4a16-g16@gptq")
