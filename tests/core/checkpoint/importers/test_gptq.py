"""GPTQ: layers of gptqmodel 7.7.0, and what its files get wrong."""

import pytest
import torch
from foreign_layers import frozen

import qcore

CASES = {
    "gptq_4_sym_v1_g128": "int4-g128",
    "gptq_4_asym_v1_desc": "int4-g128-asym",
    "gptq_4_asym_v2_desc": "int4-g128-asym",
    "gptq_4_v1_zero0": "int4-g128-asym",
    "gptq_8_asym_g64": "int8-g64-asym",
    "gptq_8_sym_channel": "int8",
}


def loaded(layer, folder):
    model = layer.model()
    qcore.load_(model, layer.write(folder))
    return model.get_submodule(layer.layer)


@pytest.mark.parametrize(("case", "format"), CASES.items())
def test_dequantizes_to_what_the_tool_computes(case, format, tmp_path):
    layer = frozen(case)
    weight = loaded(layer, tmp_path).weight
    assert str(weight.format) == str(qcore.Format.parse(format))
    assert layer.is_dense(weight.dequantize(torch.float32))
