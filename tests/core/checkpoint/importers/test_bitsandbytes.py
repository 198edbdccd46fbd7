"""bitsandbytes 0.50.2, HQQ 0.2.8 and optimum-quanto 0.2.7: their layers, and damaged ones."""

import contextlib
import json

import pytest
import torch
from foreign_layers import frozen

import qcore
from qcore.checkpoint.opening import open_checkpoint

EXACT = {
    "bnb_nf4": "nf4-g64",
    "bnb_nf4_dq": "nf4-g64",
    "bnb_fp4": "fp4_bnb-g64",
    "bnb_fp4_dq": "fp4_bnb-g64",
    "hqq_4_axis1": "int4-g64-fzp",
    "hqq_8_axis1": "int8-g64-fzp",
    "quanto_qint8": "int8",
}
CLOSE = {"bnb_int8": "int8", "quanto_qint4": "int4-g128-fzp"}


def read(layer, folder):
    model = layer.model()
    qcore.load_(model, layer.write(folder))
    return model.get_submodule(layer.layer).weight


@pytest.mark.parametrize(("case", "format"), EXACT.items())
def test_dequantizes_to_what_the_tool_computes(case, format, tmp_path):
    layer = frozen(case)
    weight = read(layer, tmp_path)
    assert str(weight.format) == f"{format}/plain"
    assert layer.is_dense(weight.dequantize(torch.float32))


@pytest.mark.parametrize(("case", "format"), CLOSE.items())
def test_is_the_tool_s_to_one_unit_in_the_last_place(case, format, tmp_path):
    """bitsandbytes multiplies twice, quanto subtracts a shift; qcore has one scale, or a zero point in its place."""
    layer = frozen(case)
    weight = read(layer, tmp_path)
    assert str(weight.format) == f"{format}/plain"
    found = weight.dequantize(torch.float32)
    unit = 2**-23 * float(found.abs().max())
    assert float((found[:2] - layer.rows).abs().max()) <= unit


def test_groups_along_the_outputs_are_refused(tmp_path):
    with pytest.raises(qcore.CheckpointError, match="axis=0"):
        read(frozen("hqq_4_axis0"), tmp_path)


def test_storage_in_another_dtype(tmp_path):
    """``bnb_4bit_quant_storage``: the same bytes, viewed."""
    layer = frozen("bnb_nf4")
    name = f"{layer.layer}.weight"
    layer.tensors[name] = layer.tensors[name].flatten().view(torch.bfloat16).reshape(-1, 1)
    assert layer.is_dense(read(layer, tmp_path).dequantize(torch.float32))


def state_of(layer):
    (name,) = (name for name in layer.tensors if "quant_state" in name)
    return name, json.loads(bytes(layer.tensors[name].tolist()))


def with_state(layer, **changes):
    name, state = state_of(layer)
    text = json.dumps(state | changes).encode()
    layer.tensors[name] = torch.tensor(list(text), dtype=torch.uint8)
    return layer


def test_blocks_across_rows_are_refused(tmp_path):
    layer = with_state(frozen("bnb_nf4"), shape=[512, 32])
    with pytest.raises(qcore.CheckpointError, match="blocks of 64 weights run across rows of 32"):
        read(layer, tmp_path)


def test_another_table_is_refused(tmp_path):
    layer = frozen("bnb_nf4")
    layer.tensors[f"{layer.layer}.weight.quant_map"][3] += 0.01
    with pytest.raises(qcore.CheckpointError, match="another table than nf4's"):
        read(layer, tmp_path)


def test_tilings_of_old_gpus_are_refused(tmp_path):
    layer = frozen("bnb_int8")
    layer.tensors[f"{layer.layer}.weight_format"] = torch.tensor(2, dtype=torch.uint8)
    with pytest.raises(qcore.CheckpointError, match="tiling of old GPUs"):
        read(layer, tmp_path)


@pytest.mark.parametrize("case", ["bnb_nf4", "bnb_nf4_dq"])
@pytest.mark.parametrize(
    "changes",
    [{"shape": "x"}, {"shape": [64]}, {"shape": [-64, -256]}, {"shape": [1 << 40, 1 << 40]}, {"blocksize": 0},
     {"blocksize": None}, {"quant_type": ["nf4"]}, {"quant_type": "af4"}, {"nested_blocksize": "256"},
     {"nested_offset": "0"}, {"nested_blocksize": 1 << 62}],
)  # fmt: skip
def test_damaged_states_never_crash(case, changes, tmp_path):
    layer = with_state(frozen(case), **changes)
    with contextlib.suppress(qcore.CheckpointError):
        read(layer, tmp_path)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xfe", b"{}", b"nul", b"9" * 200])
def test_states_that_are_no_json_object(text, tmp_path):
    layer = frozen("bnb_nf4")
    layer.tensors[state_of(layer)[0]] = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(qcore.CheckpointError, match="quant_state"):
        read(layer, tmp_path)


@pytest.mark.parametrize("case", [*EXACT, *CLOSE])
@pytest.mark.parametrize(
    "change",
    [lambda t: t.flatten()[:1], lambda t: t.flatten()[:0], lambda t: t.reshape(1, -1), lambda t: t.float(),
     lambda t: t.to(torch.int16), lambda t: torch.full_like(t, 100)],
)  # fmt: skip
def test_damaged_tensors_never_crash(case, change, tmp_path):
    for number, name in enumerate(frozen(case).tensors):
        layer = frozen(case)
        layer.tensors[name] = change(layer.tensors[name]).contiguous()
        folder = layer.write(tmp_path / str(number))
        with contextlib.suppress(qcore.CheckpointError), open_checkpoint(folder) as archive:
            for weight in archive.records:
                archive.quantized(weight)
