"""A model on the plugin, as a user has it."""

from __future__ import annotations

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
        y = layer(x)
    assert layer.decision.kernel.name == "xla.conv2d_w8a8"
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert (y - expected).norm() < 0.02 * expected.norm()
