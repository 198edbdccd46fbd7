"""The three snippets of torch_xla's document on quantized ops, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import qcore
from qcore_xla.quantized_matmul import XlaQuantizedLinear, define_op, xla_weight

CALL, OWN_MODULE, MODULE_SWAP = re.findall(
    r"```Python\n(.*?)```", Path(__file__).with_name("document.md").read_text("utf-8"), re.DOTALL
)


class Results(TorchDispatchMode):
    """Results of `quantized_matmul`, whoever calls it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.name() == "xla::quantized_matmul":
            self.found.append(result)
        return result


class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return self.linear(x)


def dense(x, w, scaler):
    return x.double() @ (w.double() * scaler.double()[:, None]).t()


def close(result, expected, tolerance=0.02):
    error = (result.cpu().double() - expected).abs().max() / expected.abs().max()
    assert float(error) < tolerance


def check_call(names):
    expected = dense(names["x"], names["w_int"], names["scaler"])
    close(names["matmul_output"], expected)
    for name in ("matmul_output_xla", "dynamo_out_xla"):
        assert names[name].device.type == "xla"
        close(names[name], expected)


def test_call_in_model_code():
    names = {}
    exec(CALL, names)
    check_call(names)


def test_call_in_model_code_on_the_op_of_qcore(device):
    """The same on our op, whose kernel is a body that JAX lowers: on CPU tensors, XLA tensors, and compiled."""
    names = {}
    exec(CALL.replace("torch.ops.xla.", "torch.ops.qcore."), names)
    check_call(names)
    quantization = (qcore.Format("int8"), None, None, False, False)
    request = qcore.LinearRequest(device, torch.bfloat16, torch.bfloat16, 20, 10, None, *quantization)
    assert qcore.resolve(request).selected.kernel == "xla.w8a16"


def test_the_op_is_torch_xlas_own():
    import torch_xla.experimental.xla_quantized_matmul as own

    assert not define_op()
    assert own.XlaQuantizedLinear is not XlaQuantizedLinear


def test_own_module(device):
    w = torch.randint(-128, 127, (20, 10), dtype=torch.int8)
    names = {"torch": torch, "processed_w": w.to(device), "processed_scaler": torch.rand(20, device=device)}
    exec(OWN_MODULE, names)
    module = names["MyQLinearForXLABackend"]()
    module.load_weight(None, None)
    x = torch.randn(3, 10)
    with Results() as results:
        module.forward(x.to(device))  # torch cannot call a module whose __init__ does not call its parent's
    (found,) = results.found
    close(found, dense(x, w, names["processed_scaler"].cpu()))


@pytest.mark.parametrize("where", ["cpu", "xla"])
def test_module_swap(where, device):
    model = MyModel()
    names = {
        "MyModel": lambda: model,
        "quantize": lambda model: qcore.quantize(model.linear.weight, qcore.Format("int8")),
        "process_for_xla": xla_weight,
        "self": model,
        "XlaQuantizedLinear": XlaQuantizedLinear,
    }
    x = torch.randn(3, 64)
    expected = model(x).detach().double()
    exec(MODULE_SWAP, names)
    assert isinstance(model.linear, XlaQuantizedLinear)
    model.to(device if where == "xla" else where)
    result = model(x.to(device if where == "xla" else where))
    assert result.device.type == where
    close(result.detach(), expected)
