"""A state dict of a layer of another format, whose tensors have the dtypes and shapes of this one."""

import io

import pytest
import torch
from torch import nn

import qcore
from qcore.nn import NeutralLinear, QuantizedLinear

ALIKE = [
    ("nf4", "w4a16-g64"), ("w4a8-g64", "nf4"), ("wfp4a16-g64", "wfp4_bnba16-g64"), ("wfp8_e5m2a16", "wfp8a16"),
    ("nvfp4", "wfp4a16-g16-e4m3d"),
]  # fmt: skip


def layer(scheme):
    torch.manual_seed(0)
    return QuantizedLinear.from_float(nn.Linear(128, 32), scheme)


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("given", "own"), ALIKE)
@pytest.mark.parametrize("kept", [dict.copy, saved_and_loaded])
def test_an_error_names_both(given, own, kept):
    state, target = layer(given).state_dict(), layer(own)
    state = state if kept is dict.copy else kept(state)
    x = torch.randn(3, 128)
    before = target(x)
    with pytest.raises(RuntimeError, match=f"{layer(given).weight.format}.*{target.weight.format}"):
        target.load_state_dict(state)
    assert torch.equal(target(x), before)


@pytest.mark.parametrize("scheme", ["w4a16-g64", "w4a8-g64"])
def test_the_same_format_is_taken_whatever_the_activations(scheme):
    source, target = layer("w4a16-g64"), layer(scheme)
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight.dequantize(), source.weight.dequantize())


def test_groups_as_long_as_a_row_are_rows():
    source, target = layer("w8a16-g128"), layer("w8a16")
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight.dequantize(), source.weight.dequantize())


def test_a_plain_dict_has_no_format_and_is_taken():
    source, target = layer("w4a16-g64"), layer("w4a16-g64")
    target.load_state_dict(dict(source.state_dict().items()))
    assert torch.equal(target.weight.dequantize(), source.weight.dequantize())


def test_neutral_layers():
    source, target = NeutralLinear.from_linear(layer("nf4")), NeutralLinear.from_linear(layer("w4a16-g64"))
    with pytest.raises(RuntimeError, match=r"nf4-g64.*int4-g64"):
        target.load_state_dict(source.state_dict())
    target.load_state_dict(NeutralLinear.from_linear(layer("w4a16-g64")).state_dict())


def test_qcore_load_takes_any_format(tmp_path):
    source, target = nn.Sequential(nn.Linear(128, 32)), nn.Sequential(nn.Linear(128, 32))
    qcore.quantize_(source, "nf4")
    qcore.quantize_(target, "w4a16-g64")
    qcore.save(source, tmp_path / "m.safetensors")
    qcore.load_(target, tmp_path / "m.safetensors")
    x = torch.randn(3, 128)
    assert torch.equal(target(x), source(x))
