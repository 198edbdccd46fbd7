"""torch_xla's API on plain CPU tensors, where torch_xla is not installed."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from op_formulas import blockwise, cosine, expected_matmul, per_channel
from torch import nn

import qcore
from qcore_xla import XlaQuantizedLinear
from qcore_xla.quantized_matmul import define_op, xla_weight

OP = torch.ops.xla.quantized_matmul
N, K = 20, 64


def test_the_call_of_the_document():
    x = torch.randn((3, 10), dtype=torch.bfloat16)
    w_int = torch.randint(-128, 127, (20, 10), dtype=torch.int8)
    scaler = torch.randn((20,), dtype=torch.bfloat16)
    y = OP(x, w_int, scaler)
    assert (y.shape, y.dtype) == ((3, 20), torch.bfloat16)
    assert cosine(y, expected_matmul(x, w_int, scaler, None, -1, False)) > 0.9999


@pytest.mark.parametrize("activation", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [-1, 32])
def test_every_row_of_the_table(block, bits, asymmetric, activation):
    torch.manual_seed(0)  # of all draws a few are at the border of two codes, which float64 rounds otherwise
    weight, x = torch.randn(N, K) + 0.2, torch.randn(2, 3, K)
    made = per_channel(weight, bits, asymmetric) if block == -1 else blockwise(weight, block, bits, asymmetric)
    y = OP(x, *made, block_size=block, int4_weight=bits == 4, quantize_activation=activation)
    torch.testing.assert_close(y.double(), expected_matmul(x, *made, block, activation), atol=1e-3, rtol=1e-3)


def test_arguments_that_are_none():
    w, scale, _ = per_channel(torch.randn(N, K))
    x = torch.randn(3, K)
    assert torch.equal(OP(x, w, scale, None, None, None, None), OP(x, w, scale))


def test_shapes_on_meta_and_in_a_graph():
    w, scale, _ = per_channel(torch.randn(N, K))
    x = torch.randn(3, K)
    assert OP(x.to("meta"), w.to("meta"), scale.to("meta")).shape == (3, N)
    compiled = torch.compile(lambda x: OP(x, w, scale), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), OP(x, w, scale))


def test_the_op_is_defined_once():
    assert define_op()
    assert define_op()


def test_torch_xlas_own_op_is_left_alone(tmp_path):
    (tmp_path / "torch_xla.py").write_text("raise RuntimeError('torch_xla was imported')\n")
    program = """
        import torch, qcore_xla
        from qcore_xla.quantized_matmul import define_op
        assert not define_op()
        assert not hasattr(torch.ops.xla, "quantized_matmul")
        torch.library.Library("xla", "DEF").define("quantized_matmul(Tensor x) -> Tensor")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=False,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["int8", "int8-asym", "int4-g32", "int4-g16-asym", "int4-g32-fzp"])
def test_module_swap(text):
    class MyModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(K, N, bias=False)

        def forward(self, x):
            return self.linear(x)

    model, x = MyModel(), torch.randn(3, K)
    weight = qcore.quantize(model.linear.weight, qcore.Format.parse(f"{text}/plain"))
    fmt = weight.format
    q_linear = XlaQuantizedLinear(
        model.linear.in_features,
        model.linear.out_features,
        is_symmetric=fmt.zero is qcore.ZeroPoint.NONE,
        block_size=fmt.group_size or -1,
        int4_weight=fmt.dtype == "int4",
    )
    q_linear.load_quantized_weight(weight)
    model.linear = q_linear
    torch.testing.assert_close(model(x), x @ weight.dequantize().t(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("block", [-1, 16])
def test_a_module_is_loaded_in_any_of_three_ways(block):
    made = blockwise(torch.randn(N, K), 16, 4, True) if block == 16 else per_channel(torch.randn(N, K), 4, True)
    layers = [XlaQuantizedLinear(K, N, block_size=block, int4_weight=True) for _ in range(3)]
    layers[0].load_quantized_weight(*made)
    layers[1].load_quantized_weight(made)
    layers[2].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, K)
    assert layers[0](x).abs().sum() > 0
    assert all(torch.equal(layer(x), layers[0](x)) for layer in layers)
    assert ("per channel" if block == -1 else "block_size=16") in repr(layers[0])


def test_an_empty_module_gives_zeros():
    assert not XlaQuantizedLinear(K, N, block_size=32)(torch.randn(2, K)).any()


@pytest.mark.parametrize(
    ("arguments", "weight", "message"),
    [
        ({}, (torch.zeros(N, K), torch.ones(N)), "int8"),
        ({}, (torch.zeros(K, N, dtype=torch.int8), torch.ones(N)), "weight has"),
        ({}, (torch.zeros(N, K, dtype=torch.int8), torch.ones(K)), "weight_scaler"),
        ({}, (torch.zeros(N, K, dtype=torch.int8), torch.ones(N), torch.ones(K)), "zero_point"),
        ({"is_symmetric": True}, (torch.zeros(N, K, dtype=torch.int8), torch.ones(N), torch.ones(N)), "is_symmetric"),
        ({}, (torch.zeros(N, K, dtype=torch.int8),), "scaler"),
        ({"block_size": 32}, qcore.quantize(torch.randn(N, K), qcore.Format("int4", 32)), "int4_weight=True"),
    ],
)
def test_what_does_not_fit_is_named(arguments, weight, message):
    layer = XlaQuantizedLinear(K, N, **arguments)
    with pytest.raises(qcore.FormatError, match=message):
        layer.load_quantized_weight(weight)


def test_blocks_that_do_not_divide():
    with pytest.raises(qcore.FormatError, match="divide"):
        XlaQuantizedLinear(K, N, block_size=48)
    with pytest.raises(qcore.FormatError, match="needs one that does"):
        xla_weight(qcore.quantize(torch.randn(N, K), qcore.Format("int8", 48)))
