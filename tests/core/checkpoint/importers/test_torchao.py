"""torchao 0.18.0: its layers, and damaged metadata."""

import contextlib
import json

import pytest
import torch
from foreign_layers import frozen
from foreign_layers import load_layer as read
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qcore

CASES = {
    "ao_int8wo": "w8a16",
    "ao_int8wo_g": "w8a16-g64",
    "ao_int8dyn": "w8a8",
    "ao_intx_asym": "w4a16-g32-asym",
    "ao_8da4w": "w4a8-g32-aasym",
    "ao_fp8wo": "wfp8a16",
    "ao_fp8_e5m2": "wfp8_e5m2a16",
    "ao_fp8_dyn_row": "wfp8afp8",
    "ao_int4": "w4a16-g64-fzp",
    "ao_int4_fp8": "w4afp8-g64-token",
    "ao_int8_asym": "w8a16-asym",
    "ao_int8_tensor": "w8a16",
    "ao_int8_static": "w8a8-static",
}


@pytest.mark.parametrize(("case", "scheme"), CASES.items())
def test_dequantizes_to_what_the_tool_computes(case, scheme, tmp_path):
    layer = frozen(case)
    module = read(layer, tmp_path)
    assert module.scheme.blank() == qcore.Scheme.parse(scheme).blank()
    assert layer.is_dense(module.weight.dequantize(torch.float32))


def test_static_activations_keep_their_scale_and_zero_point(tmp_path):
    activation = read(frozen("ao_int8_static"), tmp_path).scheme.activation
    assert activation == qcore.StaticInt8(float(torch.tensor(0.02)), -9)


@pytest.mark.parametrize(
    ("part", "tensor", "reason"),
    [
        ("act_quant_scale", torch.ones(4, 1), "several activation scales"),
        ("act_quant_zero_point", torch.tensor([[300]], dtype=torch.int16), "torch.int16"),
        ("zero_point", torch.full((1, 1), 0.5), "its zero points are torch.float32; qcore reads int8"),
        ("zero_point", torch.full((1, 1), 256, dtype=torch.int32), "its zero points are torch.int32"),
    ],
)
def test_numbers_that_int8_cannot_hold_are_refused(part, tensor, reason, tmp_path):
    layer = frozen("ao_int8_static")
    layer.tensors[f"{layer.layer}._weight_{part}"] = tensor
    with pytest.raises(qcore.CheckpointError, match=reason):
        read(layer, tmp_path)


def test_fp8_activations_become_per_token_with_a_warning(tmp_path):
    layer = frozen("ao_fp8_dyn_tensor")
    with pytest.warns(qcore.QcoreWarning, match="torchao uses one scale for all tokens"):
        module = read(layer, tmp_path)
    assert module.scheme == qcore.Scheme.parse("wfp8afp8")
    assert layer.is_dense(module.weight.dequantize(torch.float32))


@pytest.mark.parametrize(
    ("case", "changes", "told"),
    [
        ("ao_int8dyn", {"reduce_range": True}, "reduce_range"),
        ("ao_fp8_dyn_row", {"hp_value_ub": 1.0}, "hp_value_ub"),
        ("ao_fp8_dyn_row", {"float8_dtype": {"_type": "torch.dtype", "_data": "float8_e5m2"}}, "uses 'float8_e5m2'"),
    ],
)
def test_activations_unlike_those_of_torchao_are_told(case, changes, told, tmp_path):
    def changed(about):
        act = about["_data"]["act_quant_kwargs"]
        return about | {"_data": about["_data"] | {"act_quant_kwargs": act | {"_data": act["_data"] | changes}}}

    with pytest.warns(qcore.QcoreWarning, match=told):
        read(with_metadata(case, changed), tmp_path)


def test_codes_of_one_bit(tmp_path):
    """They are -1 and 0."""
    one_bit = {"_type": "torch.dtype", "_data": "int1"}
    layer = with_metadata("ao_intx_asym", lambda told: told | {"_data": told["_data"] | {"target_dtype": one_bit}})
    name = f"{layer.layer}._weight_qdata"
    layer.tensors[name] = -(layer.tensors[name] & 1)
    weight = read(layer, tmp_path).weight
    assert torch.equal(weight.codes(), layer.tensors[name])


@pytest.mark.parametrize("act", ["PerRow", [], {}, {"_data": None}, {"_data": {"granularity": {"_type": "PerGroup"}}}])
def test_other_activations_are_refused(act, tmp_path):
    layer = with_metadata("ao_fp8wo", lambda told: told | {"_data": told["_data"] | {"act_quant_kwargs": act}})
    with pytest.raises(qcore.CheckpointError, match="neither per row nor per tensor"):
        read(layer, tmp_path)


def test_files_written_again_without_their_metadata_are_refused(tmp_path):
    layer = frozen("ao_int8wo")
    layer.metadata["foreign_metadata"] = "{}"
    with pytest.raises(qcore.CheckpointError, match="metadata does not describe it"):
        read(layer, tmp_path)


def with_metadata(case, change):
    """The layer with another description of its weight."""
    layer = frozen(case)
    metadata = json.loads(layer.metadata["foreign_metadata"])
    name = f"{layer.layer}.weight"
    metadata[name] = json.dumps(change(json.loads(metadata[name])))
    layer.metadata["foreign_metadata"] = json.dumps(metadata)
    return layer


def test_other_classes_are_refused_by_name(tmp_path):
    layer = with_metadata("ao_int8wo", lambda told: told | {"_type": "Int4TilePackedTo4dTensor"})
    with pytest.raises(qcore.CheckpointError, match="its class is 'Int4TilePackedTo4dTensor'"):
        read(layer, tmp_path)


def test_pickled_directories_are_refused_with_a_remedy(tmp_path):
    (tmp_path / "config.json").write_text(frozen("ao_int8wo").metadata["config"])
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(qcore.CheckpointError, match="pickle"):
        read_folder(tmp_path)


def read_folder(folder):
    return qcore.load_(frozen("ao_int8wo").model(), folder)


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.lists(st.integers(), max_size=3)
KEYS = (
    "activation_dtype",
    "block_size",
    "target_dtype",
    "act_quant_kwargs",
    "_data",
    "_type",
    "activation_quantization",
)
DESCRIPTIONS = st.dictionaries(st.sampled_from(KEYS), VALUES | st.just({"_data": "int9"}))


@given(drawn=DESCRIPTIONS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_description(tmp_path, drawn):
    layer = with_metadata("ao_intx_asym", lambda told: told | {"_data": told["_data"] | drawn})
    with contextlib.suppress(qcore.CheckpointError):
        read(layer, tmp_path)
    layer = with_metadata("ao_int4", lambda told: told | {"_data": told["_data"] | drawn})
    with contextlib.suppress(qcore.CheckpointError):
        read(layer, tmp_path)
    layer = with_metadata("ao_fp8wo", lambda told: told | drawn)
    with contextlib.suppress(qcore.CheckpointError):
        read(layer, tmp_path)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "change", [lambda t: t.flatten()[:1], lambda t: t.flatten()[:0], lambda t: t.reshape(1, -1), lambda t: t.double()]
)
def test_damaged_tensors_never_crash(case, change, tmp_path):
    for number, name in enumerate(frozen(case).tensors):
        layer = frozen(case)
        layer.tensors[name] = change(layer.tensors[name]).contiguous()
        with contextlib.suppress(qcore.CheckpointError):
            read(layer, tmp_path / str(number))
