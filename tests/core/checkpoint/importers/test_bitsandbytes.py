"""bitsandbytes 0.50.2, HQQ 0.2.8 and optimum-quanto 0.2.7: their layers, and damaged ones."""

import contextlib
import json
import tempfile
from pathlib import Path

import pytest
import torch
from foreign_layers import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_int8_weights_differ_by_at_most_one_ulp(tmp_path):
    """Of each weight, not of the largest one: counted between neighbours in float32."""
    layer = frozen("bnb_int8")
    codes, absmax = (layer.tensors[f"{layer.layer}.{part}"] for part in ("weight", "SCB"))
    wanted = (codes * absmax[:, None]) * torch.tensor(1 / 127)
    assert layer.is_dense(wanted)
    found = read(layer, tmp_path).dequantize(torch.float32)
    apart = (found.view(torch.int32) - wanted.view(torch.int32)).abs()
    assert int(apart.max()) == 1
    assert float((apart > 0).float().mean()) < 0.3


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


@pytest.mark.parametrize("case", ["bnb_nf4", "bnb_fp4_dq"])
@pytest.mark.parametrize(
    ("shape", "group"), [((512, 32), 32), ((170, 96), 32), ((5, 130), 2), ((9, 33), 1), ((3, 4096), 64), ((2, 1), 1)]
)
def test_blocks_across_rows_become_smaller_groups(case, shape, group, tmp_path):
    """The blocks of a matrix are cut from it as if it were one row; the last one may be shorter."""
    layer = frozen(case)
    n, k = shape
    every = read(layer, tmp_path / "whole").dequantize(torch.float32).flatten()[: n * k]
    parts = {name.removeprefix(f"{layer.layer}."): name for name in layer.tensors}
    bytes_, blocks = -(-n * k // 2), -(-n * k // 64)
    layer.tensors[parts["weight"]] = layer.tensors[parts["weight"]][:bytes_]
    layer.tensors[parts["weight.absmax"]] = layer.tensors[parts["weight.absmax"]][:blocks]
    layer.tensors.pop(f"{layer.layer}.bias", None)
    layer.metadata["shape"] = f"{n},{k}"
    weight = read(with_state(layer, shape=[n, k]), tmp_path / "cut")
    assert weight.format.group_size == group
    assert torch.equal(weight.dequantize(torch.float32), every.view(n, k))


def test_another_table_is_refused(tmp_path):
    layer = frozen("bnb_nf4")
    layer.tensors[f"{layer.layer}.weight.quant_map"][3] += 0.01
    with pytest.raises(qcore.CheckpointError, match="is not the table of nf4"):
        read(layer, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), 1j, [0, 0]])
def test_formats_that_are_no_number(value, tmp_path):
    layer = frozen("bnb_int8")
    layer.tensors[f"{layer.layer}.weight_format"] = torch.tensor(value)
    with pytest.raises(qcore.CheckpointError, match="weight_format"):
        read(layer, tmp_path)


def test_scales_of_another_dtype_are_refused(tmp_path):
    layer = frozen("bnb_int8")
    name = f"{layer.layer}.SCB"
    layer.tensors[name] = layer.tensors[name].bool()
    with pytest.raises(qcore.CheckpointError, match=r"with SCB torch\.bool"):
        read(layer, tmp_path)


def test_tilings_of_old_gpus_are_refused(tmp_path):
    layer = frozen("bnb_int8")
    layer.tensors[f"{layer.layer}.weight_format"] = torch.tensor(2, dtype=torch.uint8)
    with pytest.raises(qcore.CheckpointError, match="tiled layout for old GPUs"):
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


@pytest.mark.parametrize("offset", [10**400, float("nan"), float("-inf"), 1e39, True, "0", None])
def test_offsets_that_are_no_float32(offset, tmp_path):
    with pytest.raises(qcore.CheckpointError, match="nested_offset"):
        read(with_state(frozen("bnb_nf4_dq"), nested_offset=offset), tmp_path)


def test_larger_blocks_than_there_are_scales_take_no_memory(tmp_path):
    """One block of 256 scales, said to be of 2**50: they would fill 4 PB if they were repeated before they are cut."""
    layer = frozen("bnb_nf4_dq")
    assert layer.tensors[f"{layer.layer}.weight.nested_absmax"].numel() == 1
    weight = read(with_state(layer, nested_blocksize=1 << 50), tmp_path)
    assert layer.is_dense(weight.dequantize(torch.float32))


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
)
STATES = st.dictionaries(
    st.sampled_from(("quant_type", "blocksize", "shape", "nested_blocksize", "nested_offset", "dtype")), VALUES
)


@given(changes=STATES, case=st.sampled_from(["bnb_nf4", "bnb_fp4_dq"]))
@settings(max_examples=60, deadline=None)
def test_any_state(changes, case):
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(qcore.CheckpointError):
        read(with_state(frozen(case), **changes), Path(folder))


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
