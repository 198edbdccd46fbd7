"""What `qcore.convert` writes, read back by the tools themselves."""

import json

import pytest
import torch
from safetensors import safe_open

import qcore

SCHEMES = [
    "w4a16-g32",
    "w4a16-g32-asym",
    "w8a16",
    "w8a16-g32-asym",
    "w8a8",
    "wfp8a16",
    "wfp8afp8",
    "mxfp4",
    "wfp4a16-g16-e4m3d",
]


def exported(folder, scheme, to):
    """The weight, its tensors as written, and the settings."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(128, 48, bias=False))
    qcore.quantize_(model, scheme)
    qcore.save(model, folder / "in")
    qcore.convert(folder / "in", folder / "out", to)
    with safe_open(folder / "out" / "model.safetensors", "pt") as file:
        tensors = {name.removeprefix("0."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iterator
    config = json.loads((folder / "out" / "config.json").read_text())
    return model[0].weight, tensors, config["quantization_config"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_reads_the_weight(scheme, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    weight, tensors, settings = exported(tmp_path, scheme, "compressed-tensors")
    config = QuantizationConfig.model_validate(settings)
    group = config.config_groups["group_0"]
    assert group.targets == ["0"]
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    found = compressor.decompress(tensors, group)["weight"]
    # The tool returns nvfp4 in bfloat16, whatever the model's dtype.
    assert torch.equal(found, weight.dequantize(torch.float32).to(found.dtype))
