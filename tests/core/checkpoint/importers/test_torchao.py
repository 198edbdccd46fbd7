"""torchao 0.18.0: its layers, and damaged metadata."""

import contextlib
import json

import pytest
import torch
from foreign_layers import frozen
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
}


def read(layer, folder):
    model = layer.model()
    qcore.load_(model, layer.write(folder))
    return model.get_submodule(layer.layer)


@pytest.mark.parametrize(("case", "scheme"), CASES.items())
def test_dequantizes_to_what_the_tool_computes(case, scheme, tmp_path):
    layer = frozen(case)
    module = read(layer, tmp_path)
    assert module.scheme.blank() == qcore.Scheme.parse(scheme).blank()
    assert layer.is_dense(module.weight.dequantize(torch.float32))


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
KEYS = ("block_size", "target_dtype", "act_quant_kwargs", "_data", "_type", "activation_quantization")
DESCRIPTIONS = st.dictionaries(st.sampled_from(KEYS), VALUES | st.just({"_data": "int9"}))


@given(drawn=DESCRIPTIONS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_description(tmp_path, drawn):
    layer = with_metadata("ao_intx_asym", lambda told: told | {"_data": told["_data"] | drawn})
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
