"""HQQ 0.2.8: 2 and 3 bits, packed words viewed as floats, and descriptions that do not fit."""

import contextlib
import tempfile
from pathlib import Path

import pytest
import torch
from foreign_layers import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

import qcore
from qcore.checkpoint.opening import open_checkpoint

CASES = ("hqq_2_axis1", "hqq_3_axis1", "hqq_4_float_view")


def read(layer, folder):
    model = layer.model()
    qcore.load_(model, layer.write(folder))
    return model.get_submodule(layer.layer).weight


def with_part(case, part, tensor):
    layer = frozen(case)
    layer.tensors[f"{layer.layer}.{part}"] = tensor
    return layer


@pytest.mark.parametrize("case", CASES)
def test_dequantizes_to_what_the_tool_computes(case, tmp_path):
    layer = frozen(case)
    weight = read(layer, tmp_path)
    assert weight.format == qcore.Format.parse("int4-g64-fzp")
    assert layer.is_dense(weight.dequantize(torch.float32))


@pytest.mark.parametrize("case", CASES)
def test_codes_use_all_of_their_bits_and_no_more(case, tmp_path):
    """Codes of fewer bits lie around zero, as those of 4 bits do."""
    centre = 1 << (int(case[4]) - 1)
    codes = read(frozen(case), tmp_path).codes()
    assert (int(codes.min()), int(codes.max())) == (-centre, centre - 1)


@pytest.mark.parametrize(("shape", "group"), [((512, 32), 32), ((128, 96), 32), ((96, 128), 64), ((4, 1088), 64)])
def test_groups_across_rows_become_smaller_ones(shape, group, tmp_path):
    layer = frozen("hqq_8_axis1")
    n, k = shape
    every = read(layer, tmp_path / "whole").dequantize(torch.float32).flatten()[: n * k]
    for part in ("W_q", "scale", "zero"):
        name = f"{layer.layer}.{part}"
        layer.tensors[name] = layer.tensors[name].reshape(256, -1)[: n * k // 64].contiguous()
    layer.tensors[f"{layer.layer}.shape"] = torch.tensor(shape)
    layer.tensors.pop(f"{layer.layer}.bias", None)
    layer.metadata["shape"] = f"{n},{k}"
    weight = read(layer, tmp_path / "cut")
    assert weight.format.group(k) == group
    assert torch.equal(weight.dequantize(torch.float32), every.view(n, k))


@pytest.mark.parametrize("bits", [0, 1, 5, -4])
def test_other_bits_are_refused(bits, tmp_path):
    with pytest.raises(qcore.CheckpointError, match=f"it has {bits} bits"):
        read(with_part("hqq_4_axis1", "nbits", torch.tensor(bits)), tmp_path)


@pytest.mark.parametrize(
    ("part", "tensor", "reason"),
    [
        ("shape", torch.tensor([64, 1 << 62]), "its shape needs"),
        ("shape", torch.tensor([64, 512]), "its W_q has 8192 bytes; its shape needs 16384"),
        ("shape", torch.tensor([3, 256]), "its W_q has 8192 bytes; its shape needs 384"),
        ("shape", torch.tensor([3, 25]), "do not split a weight"),
        ("shape", torch.tensor([0, 256]), "shape"),
        ("shape", torch.tensor([1.0, 2.0]), "its shape is torch.float32"),
        ("axis", torch.zeros(1000, dtype=torch.int32), "its axis is torch.int32"),
        ("W_q", torch.zeros(2048, dtype=torch.int32), "it must be torch.uint8"),
        ("zero", torch.zeros(255), "its zeros"),
        ("zero", torch.zeros(256, dtype=torch.int32), "its zeros torch.int32"),
        ("scale", torch.zeros(256, dtype=torch.uint8), "its scales are torch.uint8"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_they_are_read(part, tensor, reason, tmp_path):
    folder = with_part("hqq_4_axis1", part, tensor).write(tmp_path)
    with pytest.raises(qcore.CheckpointError, match=reason), open_checkpoint(folder):
        pass


def test_scales_that_are_quantized_themselves_are_refused(tmp_path):
    """HQQ cannot write them to safetensors: its state_dict raises."""
    layer = frozen("hqq_4_axis1")
    layer.tensors[f"{layer.layer}.scale_q"] = layer.tensors.pop(f"{layer.layer}.scale")
    with pytest.raises(qcore.CheckpointError, match="quantized scales are not supported"):
        read(layer, tmp_path)


NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 300)


@given(
    case=st.sampled_from(CASES),
    part=st.sampled_from(("shape", "nbits", "axis", "view_as_float")),
    numbers=st.lists(NUMBERS, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_any_description(case, part, numbers):
    layer = with_part(case, part, torch.tensor(numbers, dtype=torch.int64))
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(qcore.CheckpointError):
        read(layer, Path(folder))
