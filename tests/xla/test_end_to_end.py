"""A model on the plugin, as a user has it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import qcore


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = (torch.nn.Embedding(50, 128), torch.nn.Linear(128, 64), torch.nn.GELU(), torch.nn.Linear(64, 128))
    return torch.nn.Sequential(*layers).eval()


def test_only_on_request(model):
    qcore.quantize_(model, "w8a16")
    assert not any(name.startswith("xla.") for name in qcore.report(model).kernels())
    decision = qcore.explain("w8a16", device="cpu", n=64, k=128)
    (row,) = [c for c in decision.candidates if c.plugin == "xla"]
    assert row.stage == "outranked"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model(model, compiled, tmp_path):
    tokens = torch.tensor([[1, 2, 49]])
    with qcore.using("xla"):
        qcore.quantize_(model, {"0": "w8a16", "*": "w4a16-g32"})
        assert qcore.report(model).kernels() == {"xla.embedding": 1, "xla.w4a16": 2}
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        with torch.no_grad():
            y = call(tokens)
        qcore.save(model, tmp_path / "model.safetensors")
    with qcore.using("torch"):
        other = torch.nn.Sequential(
            torch.nn.Embedding(50, 128), torch.nn.Linear(128, 64), torch.nn.GELU(), torch.nn.Linear(64, 128)
        ).eval()
        qcore.load_(other, tmp_path / "model.safetensors")
        with torch.no_grad():
            torch.testing.assert_close(y, other(tokens), rtol=1e-4, atol=1e-4)


def test_gradients_of_the_input(model):
    with qcore.using("xla"):
        qcore.quantize_(model, "w8a16")
        x = torch.randn(3, 128, requires_grad=True)
        model[1](x).sum().backward()
    torch.testing.assert_close(x.grad, model[1].weight.dequantize().sum(0).expand(3, -1))


def test_convolutions():
    conv = torch.nn.Conv2d(3, 5, 3, stride=2, padding=1)
    x = torch.randn(2, 3, 9, 9)
    with qcore.using("xla"), torch.no_grad():
        expected = conv(x)
        layer = qcore.nn.QuantizedConv2d.from_float(conv, "w8a8")
        found = {kind: layer(x.to(memory_format=kind)) for kind in (torch.contiguous_format, torch.channels_last)}
    assert layer.decision.kernel.name == "xla.conv2d_w8a8"
    for kind, y in found.items():
        assert y.is_contiguous(memory_format=kind)
        assert (y - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [50, 64])
def test_a_bias_that_is_written_to_unseen_counts(n, dtype):
    with qcore.using("xla"):
        linear = qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(64, n, dtype=dtype), "w8a16")
        conv = qcore.nn.QuantizedConv2d.from_float(torch.nn.Conv2d(4, n, 3, dtype=dtype), "w8a16")

    def bias_of(layer, *shape):
        y = layer(torch.zeros(shape, dtype=dtype))
        assert layer.decision.plugin == "xla"
        return y.flatten().unique().tolist()

    with torch.no_grad():
        for layer, shape in ((linear, (1, 64)), (conv, (1, 4, 3, 3))):
            bias_of(layer, *shape)
            layer.bias.data = torch.full((n,), 8.0, dtype=dtype)
            assert bias_of(layer, *shape) == [8.0]
            layer.bias.data.fill_(3)
            assert bias_of(layer, *shape) == [3.0]
            torch.nn.utils.vector_to_parameters(torch.full((n,), 5.0, dtype=dtype), layer.parameters())
            assert bias_of(layer, *shape) == [5.0]


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16-g32", "w8a16", "w4a8-g32-asym", "w8a8-aasym"])
def test_a_program_may_forbid_jax_to_promote_ranks(scheme):
    import jax

    with qcore.using("xla", strict=True):
        layer = qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(96, 40), scheme)
    x = torch.randn(3, 96)
    with torch.no_grad(), jax.numpy_rank_promotion("raise"):
        y = layer(x)
    torch.testing.assert_close(y, layer(x).detach(), rtol=1e-5, atol=1e-5)


def test_an_exported_program_finds_its_ops_after_the_import(tmp_path):
    with qcore.using("xla"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 32)).eval()
        qcore.quantize_(model, "w8a16")
    x, file = torch.randn(2, 64), tmp_path / "model.pt2"
    with torch.no_grad():
        torch.export.save(torch.export.export(model, (x,)), file)
        torch.save((x, model(x)), tmp_path / "expected.pt")
    code = f"""if True:
        import torch, qcore_xla
        x, expected = torch.load({str(tmp_path / "expected.pt")!r})
        torch.testing.assert_close(torch.export.load({str(file)!r}).module()(x), expected)
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
