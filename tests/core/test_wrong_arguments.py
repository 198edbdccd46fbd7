"""Arguments of a wrong type or value: an error of qcore that names the argument, not one of torch from within."""

import numpy as np
import pytest
import torch
from torch import nn

import qcore
from qcore import CheckpointError, FormatError, UnsupportedError

LINEAR = nn.Linear(4, 4)


@pytest.mark.parametrize(("arguments", "named"), [
    ({"dtype": "float32"}, "dtype is 'float32'"), ({"dtype": torch.int8}, "dtype is torch.int8"),
    ({"dtype": torch.float8_e4m3fn}, "dtype is torch.float8"),
    ({"n": -1}, "n is -1"), ({"k": 64.0}, "k is 64.0"), ({"n": None}, "n is None"), ({"rows": "x"}, "rows is 'x'"),
    ({"k": True}, "k is True"), ({"device": "cudda"}, "device is 'cudda'"), ({"device": 3.5}, "device is 3.5"),
])  # fmt: skip
def test_explain_names_the_argument_and_blames_no_kernel(arguments, named):
    with pytest.raises(FormatError, match=named):
        qcore.explain("w8a16", **arguments)
    assert qcore.explain("w8a16", n=64, k=64).kernel is not None


def test_explain_takes_any_integer():
    assert qcore.explain("w8a16", n=np.int64(64), k=64, rows=np.int32(4)).kernel is not None


def test_calibration_takes_what_can_be_indexed():
    class Batches:
        def __getitem__(self, i):
            return torch.randn(2, 4) if i < 2 else [][i]

    model = nn.Sequential(nn.Linear(4, 4))
    qcore.quantize_(model, "w8a8-static", calibration=Batches())
    assert isinstance(model[0], qcore.nn.QuantizedLinear)


@pytest.mark.parametrize(("call", "error", "named"), [
    (lambda: qcore.quantize_(nn.Sequential(LINEAR), "w8a8-static", calibration=5), FormatError, "calibration is 5"),
    (lambda: qcore.quantize_(nn.Sequential(LINEAR), "w8a16", progress=3), UnsupportedError, "progress is 3"),
    (lambda: qcore.quantize_(None, "w8a16"), UnsupportedError, "not a NoneType"),
    (lambda: qcore.report(None), UnsupportedError, "report takes a torch.nn.Module"),
    (lambda: qcore.nn.QuantizedLinear.from_float(None, "w8a16"), UnsupportedError, "from_float takes"),
    (lambda: qcore.nn.QuantizedConv2d.from_float(3, "w8a16"), UnsupportedError, "from_float takes"),
    (lambda: qcore.nn.QuantizedEmbedding.from_float("e", "w8a16"), UnsupportedError, "from_float takes"),
    (lambda: qcore.save("x.safetensors", LINEAR), CheckpointError, "then a path, not"),
    (lambda: qcore.save(LINEAR, ""), CheckpointError, "then a path, not ''"),
    (lambda: qcore.load_("x.safetensors", LINEAR), UnsupportedError, "load_ takes a torch.nn.Module"),
    (lambda: qcore.quantize([[1.0, 2.0]], "int8"), FormatError, "must be a torch.Tensor, not a list"),
    (lambda: qcore.quantize(torch.eye(4).to_sparse(), "int8"), FormatError, "to_dense"),
    (lambda: qcore.quantize(torch.eye(4), "w8a16"), FormatError, r"Scheme.parse\(text\).weight"),
])  # fmt: skip
def test_an_argument_is_named(call, error, named):
    with pytest.raises(error, match=named):
        call()
    assert not isinstance(LINEAR, qcore.nn.QuantizedLinear)
