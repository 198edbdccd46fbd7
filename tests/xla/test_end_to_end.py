"""A model on the plugin, as a user has it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from grids import sampled

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [50, 64])
def test_a_bias_may_be_swapped(n, dtype, monkeypatch):
    with qcore.using("xla", strict=True):
        layer = qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(64, n, dtype=dtype), "w8a16")
    x = torch.zeros(1, 64, dtype=dtype)
    with torch.no_grad():
        layer(x)
        torch.utils.swap_tensors(layer.bias, torch.nn.Parameter(torch.full((n,), 4.0, dtype=dtype)))
        assert layer(x).unique().tolist() == [4.0]
        monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        layer.to(torch.float16)
        assert layer(x.half()).unique().tolist() == [4.0]


def test_biases_in_turn_are_each_their_own():
    with qcore.using("xla", strict=True):
        layer = qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(64, 32), "w8a16")
    kernel, packed, x = layer.decision.kernel, layer._primary.packed, torch.zeros(1, 64)
    biases = [torch.full((32,), float(i)) for i in range(7)]
    for _ in range(2):
        assert [kernel(x, packed, bias).unique().item() for bias in biases] == list(range(7))
    biases[3].data.fill_(9)
    assert kernel(x, packed, biases[3]).unique().item() == 9
    with pytest.raises(qcore.FormatError, match=r"bias has shape \(31,\); this weight needs \(32,\)"):
        kernel(x, packed, torch.zeros(31))


@pytest.mark.parametrize("n", [50, 64])
def test_on_a_gpu_a_bias_is_written_anew_by_each_call(n):
    from qcore_xla import packing
    from qcore_xla.biases import Biases

    of = packing.plan(n, 64, 8, None)
    mine, first = Biases(of), torch.zeros(of.n)
    room = mine._written(first)
    assert room.shape == (of.rows,)
    first.data.fill_(2)
    assert mine._written(first) is room
    assert room[:n].unique().tolist() == [2.0]
    mine._written(torch.full((n,), 5.0).bfloat16())
    assert room[:n].unique().tolist() == [5.0]
    assert not room[n:].any()
    assert first.unique().tolist() == [2.0]


ZEROS = ["w8a8-aasym", "w4a8-aasym", "w8a8-g64-asym-aasym", "w8a8-g64-fzp-aasym", "w4a8-g32-asym-aasym"]
ZEROS += ["w8a8-static(0.02,7)", "w4a8-g32-asym-static(0.02,-9)"]


@pytest.mark.parametrize(("scheme", "rows"), sampled([(scheme, rows) for scheme in ZEROS for rows in (1, 5)], 3))
def test_zeros_give_zeros(scheme, rows):
    torch.manual_seed(0)
    with qcore.using("xla", strict=True):
        layer = qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(4096, 32, bias=False), scheme)
        conv = qcore.nn.QuantizedConv2d.from_float(torch.nn.Conv2d(64, 16, 3, padding=1, bias=False), scheme)
    with torch.no_grad():
        assert not layer(torch.zeros(rows, 4096)).any()
        assert not conv(torch.zeros(rows, 64, 3, 3)).any()


@pytest.mark.parametrize("scheme", ["w8a16", "w4a8-g32-asym-aasym"])
@pytest.mark.parametrize("contract", ["linear", "embedding"])
def test_a_first_call_inside_of_what_a_program_does_with_jax(scheme, contract):
    import jax

    def made():
        with qcore.using("xla", strict=True):
            if contract == "embedding":
                return qcore.nn.QuantizedEmbedding.from_float(torch.nn.Embedding(7, 40), "w8a16"), torch.arange(7)
            return qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(72, 40), scheme), torch.randn(3, 72)

    def right(layer, x, y):
        assert layer.decision.plugin == "xla"
        torch.testing.assert_close(y, layer(x))

    found = []
    layer, x = made()

    @jax.jit
    def traced(a):
        found.append(layer(x))
        return a + 1

    with torch.no_grad():
        assert traced(1.0) == 2.0
        right(layer, x, found[0])
        for level in ("disallow", "disallow_explicit"):
            layer, x = made()
            with jax.transfer_guard(level):
                y = layer(x)
            right(layer, x, y)


BOTH = """
import torch, qcore
from qcore.resolving import resolver
layers = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 16)).eval()
with qcore.using("xla"):
    qcore.quantize_(layers, "w8a16")
x = torch.randn(4, 32)
with torch.no_grad():
    results = [layers(x + i) for i in range(6)]
    kept = [y.clone() for y in results]
    results += [layers(x) for _ in range(6)]
    assert all(torch.equal(y, was) for y, was in zip(results, kept))
    assert len({y.data_ptr() for y in results}) == 12
    results[6].fill_(7)
    assert torch.equal(results[7], kept[0])
"""


def test_results_are_each_their_own():
    subprocess.run([sys.executable, "-c", BOTH], check=True, timeout=120)
